//! Zyphra's older names: layer 2i is an attention, layer 2i + 1 its experts, and each layer scales the residual that enters
//! it, where ours scales the one that leaves the sublayer before.

/// Where a tensor of the older layout belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It is a parameter of this name.
    Whole(String),
    /// It is one expert's part of a parameter.
    Expert(String, usize),
}

/// Names below an attention's layer.
const ATTENTION: [(&str, &str); 11] = [
    ("input_norm.weight", "input_layernorm.weight"),
    ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ("self_attn.qkv.linear_q.weight", "self_attn.qkv_proj.q_proj.weight"),
    ("self_attn.qkv.linear_k.weight", "self_attn.qkv_proj.k_proj.weight"),
    ("self_attn.qkv.val_proj1.weight", "self_attn.qkv_proj.v_proj_current.weight"),
    ("self_attn.qkv.val_proj2.weight", "self_attn.qkv_proj.v_proj_delayed.weight"),
    ("self_attn.qkv.conv_qk.0.weight", "self_attn.qkv_proj.conv_qk_depthwise.weight"),
    ("self_attn.qkv.conv_qk.0.bias", "self_attn.qkv_proj.conv_qk_depthwise.bias"),
    ("self_attn.qkv.conv_qk.1.weight", "self_attn.qkv_proj.conv_qk_grouped.weight"),
    ("self_attn.qkv.conv_qk.1.bias", "self_attn.qkv_proj.conv_qk_grouped.bias"),
    ("self_attn.qkv.temp", "self_attn.qk_norm.temp"),
];

/// Names below the experts' layer.
const EXPERTS: [(&str, &str); 11] = [
    ("input_norm.weight", "post_attention_layernorm.weight"),
    ("zaya_block.router.down_proj.weight", "mlp.gate.down_proj.weight"),
    ("zaya_block.router.down_proj.bias", "mlp.gate.down_proj.bias"),
    ("zaya_block.router.router_states_scale", "mlp.gate.router_states_scale"),
    ("zaya_block.router.balancing_biases", "mlp.gate.balancing_biases"),
    ("zaya_block.router.rmsnorm_eda.weight", "mlp.gate.router_mlp.norm.weight"),
    ("zaya_block.router.router_mlp.0.weight", "mlp.gate.router_mlp.fc1.weight"),
    ("zaya_block.router.router_mlp.0.bias", "mlp.gate.router_mlp.fc1.bias"),
    ("zaya_block.router.router_mlp.2.weight", "mlp.gate.router_mlp.fc2.weight"),
    ("zaya_block.router.router_mlp.2.bias", "mlp.gate.router_mlp.fc2.bias"),
    ("zaya_block.router.router_mlp.4.weight", "mlp.gate.router_mlp.out_proj.weight"),
];

/// Where `name` belongs in a model of `layers` layers (as ours); `None` if nothing there has this name.
pub(super) fn place(name: &str, layers: i64) -> Option<Place> {
    let whole = |name: String| Some(Place::Whole(name));
    match name {
        "model.embed_tokens.weight" => return whole(name.to_owned()),
        "model.final_norm.weight" | "model.norm.weight" => {
            return whole("model.norm.weight".to_owned());
        }
        _ => {}
    }
    if let Some(part) = name.strip_prefix("model.res_scale.") {
        return whole(format!("model.layers.{}.post_mlp_residual_scale.{part}", layers - 1));
    }
    let (half, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let half: i64 = half.parse().ok().filter(|half| *half < 2 * layers)?;
    let layer = half / 2;
    if let Some(part) = rest.strip_prefix("res_scale.") {
        return whole(match (half, half % 2) {
            // Nothing but the embedding has come before: only its own scale and bias exist.
            (0, _) => format!("model.input_{part}"),
            (_, 0) => format!("model.layers.{}.post_mlp_residual_scale.{part}", layer - 1),
            _ => format!("model.layers.{layer}.post_attention_residual_scale.{part}"),
        });
    }
    if let Some(rest) = rest.strip_prefix("zaya_block.experts.local_experts.") {
        let (expert, part) = rest.split_once('.')?;
        let part = match part {
            "linear_fc1.weight" => "gate_up_proj",
            "linear_fc2.weight" => "down_proj",
            _ => return None,
        };
        let name = format!("model.layers.{layer}.mlp.experts.{part}");
        return Some(Place::Expert(name, expert.parse().ok()?));
    }
    let table = if half % 2 == 0 { &ATTENTION } else { &EXPERTS };
    let (_, ours) = table.iter().find(|(theirs, _)| *theirs == rest)?;
    whole(format!("model.layers.{layer}.{ours}"))
}
