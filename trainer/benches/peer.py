"""Trains ZAYA1 in plain PyTorch as fast as plain PyTorch can: what `ztrain` on a GPU is compared with.

    python trainer/benches/peer.py [--model zaya1-1b] [--tokens 8192] [--micro-batches 2] [--rows A,B] [--steps 12]
                                   [--seconds 120] [--weights DIR] [--device cuda|cpu] [--dtype bf16|f32]
    python trainer/benches/peer.py --check      # loss and loss after one step beside transformers' own model, f32, CPU

The equations are those of transformers' zaya, with documents kept apart: convolutions, value shift and attention begin
anew with each. Weights are random or what `ztrain export` wrote (`--weights`). The residual, the router and all vectors
are f32, matrices are bf16 with f32 masters; the optimizer is fused AdamW over one flat tensor, with clipping and the
balancing biases' update. Determinism is not asked for. Row A sums the gradients of micro-batches in f32, row B in bf16.
Prints a JSON line for each fact as soon as it is known. An optimization that fails is left out, and its line says why.
Needs PyTorch 2.11; `--check` needs transformers as well.
"""

import argparse
import contextlib
import gc
import json
import math
import pathlib
import signal
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

SMALL = dict(D=256, L=6, H=4, KH=2, d=64, I=256, E=8, R=64, V=8192, theta=1e4)
SHAPES = {"zaya1-nano": SMALL, "zaya1-20m": SMALL | dict(D=512, L=16, I=512),
          "zaya1-1b": dict(D=1024, L=26, H=8, KH=2, d=64, I=768, E=16, R=128, V=8192, theta=1e4)}
EPS, CHUNK, DOCUMENT = 1e-5, 4096, 128
START = time.perf_counter()
ATTENTION = "aten"                                                          # or "varlen_attn", which a compiler cannot look into


def say(**fact):
    print(json.dumps({"peer": fact.pop("what"), **fact, "at": round(time.perf_counter() - START, 1)}), flush=True)


def pieces(c):
    """Name here, shape, tensors of transformers that it holds one below the other: matrices first, then vectors and f32."""
    D, R, E, C, K, d = c["D"], c["R"], c["E"], (c["H"] + c["KH"]) * c["d"], c["KH"] * c["d"], c["d"]
    matrices, others = [("emb", (c["V"], D), ["embed_tokens.weight"])], []
    for l in range(c["L"]):
        at, qkv, gate = f"layers.{l}.", f"layers.{l}.self_attn.qkv_proj.", f"layers.{l}.mlp.gate."
        matrices += [(f"{l}.qkv", (C + K, D), [qkv + n + ".weight" for n in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")]),
                     (f"{l}.grouped", (C, d, 2), [qkv + "conv_qk_grouped.weight"]),
                     (f"{l}.o", (D, c["H"] * d), [at + "self_attn.o_proj.weight"]),
                     (f"{l}.down", (R, D), [gate + "down_proj.weight"]),
                     (f"{l}.gate_up", (E, 2 * c["I"], D), [at + "mlp.experts.gate_up_proj"]),
                     (f"{l}.out", (E, D, c["I"]), [at + "mlp.experts.down_proj"])]
        scales = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
        others += [(f"{l}.norm", (D,), [at + "input_layernorm.weight"]), (f"{l}.norm2", (D,), [at + "post_attention_layernorm.weight"]),
                   (f"{l}.depth", (C, 2), [qkv + "conv_qk_depthwise.weight"]), (f"{l}.depth_b", (C,), [qkv + "conv_qk_depthwise.bias"]),
                   (f"{l}.grouped_b", (C,), [qkv + "conv_qk_grouped.bias"]), (f"{l}.temp", (c["KH"],), [at + "self_attn.qk_norm.temp"]),
                   (f"{l}.scales", (4, D), [at + "post_attention_residual_scale." + n for n in scales]),
                   (f"{l}.scales2", (4, D), [at + "post_mlp_residual_scale." + n for n in scales]),
                   (f"{l}.down_b", (R,), [gate + "down_proj.bias"]), (f"{l}.gamma", (R,), [gate + "router_states_scale"] if l else []),
                   (f"{l}.rnorm", (R,), [gate + "router_mlp.norm.weight"]),
                   (f"{l}.fc1", (R, R), [gate + "router_mlp.fc1.weight"]), (f"{l}.fc1_b", (R,), [gate + "router_mlp.fc1.bias"]),
                   (f"{l}.fc2", (R, R), [gate + "router_mlp.fc2.weight"]), (f"{l}.fc2_b", (R,), [gate + "router_mlp.fc2.bias"]),
                   (f"{l}.classes", (E + 1, R), [gate + "router_mlp.out_proj.weight"])]
    others += [("in", (2, D), ["input_hidden_states_scale", "input_hidden_states_bias"]), ("norm", (D,), ["norm.weight"])]
    return matrices, others


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient takes the order back instead of adding into places."""
    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None


def norm(x, weight, to):
    x = x.float()
    return (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))).to(to)


def attend(q, k, v, place, scale):
    if q.is_cuda and ATTENTION == "varlen_attn":
        return varlen_attn(q, k, v, place["ends"], place["ends"], place["longest"], place["longest"], scale=scale, window_size=(-1, 0))
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(q, k, v, place["ends"], place["ends"], place["longest"], place["longest"],
                                                       0.0, True, False, scale=scale)[0]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=place["mask"], scale=scale, enable_gqa=True)[0].transpose(0, 1)


def layer(c, x, state, beta, place, w):
    """A layer over the rows of a micro-batch, one document behind the other: `x` f32, the router's state f32."""
    H, KH, d, E, to = c["H"], c["KH"], c["d"], c["E"], w["qkv"].dtype
    n, Q, G, begin = x.shape[0], H * d, H + KH, place["begin"]
    u = norm(x, w["norm"], to)
    z = u @ w["qkv"].t()
    qk, now, delayed = z[:, :G * d].float(), z[:, G * d:G * d + KH * d // 2], z[:, G * d + KH * d // 2:]
    zero = lambda t: torch.cat([torch.zeros_like(t[:1]), t[:-1]])          # of the token before
    first = w["depth"][:, 0] * torch.where(begin, 0.0, zero(qk)) + w["depth"][:, 1] * qk + w["depth_b"]
    before = torch.where(begin, w["depth_b"], zero(first))
    taps = torch.cat([before.to(to).view(n, G, d), first.to(to).view(n, G, d)], -1).transpose(0, 1)
    kernel = w["grouped"].view(G, d, d, 2).permute(0, 3, 2, 1).reshape(G, 2 * d, d)
    second = torch.bmm(taps, kernel).transpose(0, 1).float() + w["grouped_b"].view(G, d)
    heads = qk.view(n, G, d)
    mean = (heads[:, :H].reshape(n, KH, H // KH, d) + heads[:, H:, None]) * 0.5
    second = second + torch.cat([mean.reshape(n, H, d), mean.mean(2)], 1)
    second = second * (math.sqrt(d) / second.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(to).eps))
    second = torch.cat([second[:, :H], second[:, H:] * w["temp"][:, None]], 1)
    cos, sin, half = place["cos"][:, None], place["sin"][:, None], d // 4
    a, b = second[..., :half], second[..., half:2 * half]
    second = torch.cat([a * cos - b * sin, b * cos + a * sin, second[..., 2 * half:]], -1).to(to)
    values = torch.cat([now, torch.where(begin, 0.0, zero(delayed)).to(to)], -1).view(n, KH, d)
    attended = attend(second[:, :H].contiguous(), second[:, H:].contiguous(), values, place, d ** -0.5)
    merge = lambda y, x, s: (y.float() + s[1]) * s[0] + (x + s[3]) * s[2]
    x = merge(attended.reshape(n, Q) @ w["o"].t(), x, w["scales"])
    v = norm(x, w["norm2"], to)
    state = (v @ w["down"].t()).float() + w["down_b"] + state * w["gamma"]
    h = F.gelu(F.linear(norm(state, w["rnorm"], torch.float32), w["fc1"], w["fc1_b"]))
    h = F.gelu(F.linear(h, w["fc2"], w["fc2_b"]))
    share = torch.softmax(h @ w["classes"].t(), -1)
    choice = (share.detach() + beta).argmax(-1, keepdim=True)
    weight = share.gather(1, choice)
    counts = (choice == torch.arange(E + 1, device=x.device)).sum(0)
    order = choice.view(-1).to(torch.uint8).argsort(stable=True)           # the skip class is the last
    back = torch.empty_like(order).scatter_(0, order, torch.arange(n, device=x.device))
    ends = counts[:E].cumsum(0).to(torch.int32)
    taken = torch.arange(n, device=x.device)[:, None] < ends[-1]           # products leave the rows behind unwritten
    rows = torch.where(taken, Permute.apply(v, order, back), 0)
    gate, up = products(rows, w["gate_up"], ends).chunk(2, -1)
    y = products(F.silu(gate.float()).to(to) * up, w["out"], ends)
    y = Permute.apply(torch.where(taken, y, 0), back, order)
    return merge((y.float() * torch.where(choice == E, 0.0, weight)).to(to), x, w["scales2"]), state, counts


def products(x, weights, ends):
    if x.is_cuda:
        return torch._grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    # On a CPU only losses matter: every expert over all rows.
    expert = (torch.arange(len(x))[:, None] >= ends).sum(1, keepdim=True)
    return sum(torch.where(expert == e, x @ weight.t(), 0.0) for e, weight in enumerate(weights))


def embed(tokens, emb, scale):
    return ((F.embedding(tokens, emb) + scale[1]) * scale[0]).float()


def head(x, labels, weight, emb):
    """Sum over labels of cross-entropy; a label of -1 is none."""
    x, total = norm(x, weight, emb.dtype), 0.0
    for at in range(0, len(x), CHUNK):
        logits, label = (x[at:at + CHUNK] @ emb.t()).float(), labels[at:at + CHUNK]
        own = logits.gather(1, label.clamp_min(0)[:, None])[:, 0]
        total = total + ((logits.logsumexp(-1) - own) * (label >= 0)).sum()
    return total


class Model:
    def __init__(self, c, tokens, micro_batches, device, dtype, row, document=DOCUMENT):
        self.c, self.tokens, self.device, self.micro_batches = c, tokens, device, micro_batches
        matrices, others = pieces(c)
        round_up = lambda shape: -(-math.prod(shape) // 64) * 64
        sizes = [sum(round_up(shape) for _, shape, _ in part) for part in (matrices, others)]
        self.narrow = sizes[0]
        self.master = torch.zeros(sum(sizes), device=device)
        self.copy = self.master[:self.narrow] if dtype == torch.float32 else torch.zeros(self.narrow, device=device, dtype=dtype)
        self.grad = torch.zeros_like(self.master)
        # Row B: matrices' gradients are summed in their own type, and widened once a step.
        self.sums = self.grad[:self.narrow] if row == "A" else torch.zeros_like(self.copy)
        self.weights, self.names, self.added, at, self.first = {}, {}, {}, 0, True
        generator = torch.Generator(device).manual_seed(1)
        for index, (key, shape, names) in enumerate(matrices + others):
            wide, count = index >= len(matrices), math.prod(shape)
            self.names[key] = (names, self.master[at:at + count].view(shape))
            into = self.names[key][1]
            if not wide or key.split(".")[-1] in ("depth", "fc1", "fc2", "classes"):
                into.normal_(0, 0.02, generator=generator)
            elif key.endswith(("scales", "scales2", "in")):
                into[::2] = 1.0
            elif not key.endswith("_b"):
                into.fill_(1.0)
            source = self.master if wide else self.copy
            self.weights[key] = weight = source[at:at + count].view(shape).detach().requires_grad_()
            self.added[key] = (self.grad if wide else self.sums)[at:at + count].view(shape)
            if not wide:
                weight.register_post_accumulate_grad_hook(lambda w, into=self.added[key]: self.add(w, into))
            at += round_up(shape)
        self.wide = [key for key, _, _ in others]
        self.layers = [{key.split(".")[1]: w for key, w in self.weights.items() if key.startswith(f"{l}.")} for l in range(c["L"])]
        self.beta = torch.zeros(c["L"], c["E"] + 1, device=device)
        self.beta[:, -1] = -1.0
        self.moments = torch.zeros(2, c["L"], c["E"], device=device)
        self.counts, self.loss, self.steps = torch.zeros_like(self.beta), torch.zeros((), device=device), 0
        self.input, self.labels = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2))
        start = torch.arange(0, tokens + 1, document, device=device)
        place = torch.arange(tokens, device=device) % document
        angle = place[:, None].float() * (1.0 / (c["theta"] ** (torch.arange(0, c["d"] // 2, 2, device=device).float() / (c["d"] // 2))))
        same = torch.arange(tokens) // document
        self.place = {"begin": (place == 0)[:, None], "ends": start.to(torch.int32), "longest": document, "cos": angle.cos(), "sin": angle.sin()}
        if device.type == "cpu":
            self.place["mask"] = (same[:, None] == same) & (torch.arange(tokens)[:, None] >= torch.arange(tokens))
        self.share = 1.0 / (tokens // document * (document - 1) * micro_batches)
        self.functions = embed, layer, head
        self.replays = None
        self.finish()
        self.master.grad = self.grad
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True,
                                           capturable=device.type == "cuda")

    def add(self, weight, into):
        (into.copy_ if self.first else into.add_)(weight.grad)
        weight.grad = None

    def finish(self):
        if self.copy.dtype != torch.float32:
            self.copy.copy_(self.master[:self.narrow])

    def micro_batch(self, first):
        """Forward and backward of what stands in `input` and `labels`; gradients are added to the sums, or are their first."""
        self.first = first
        embedding, block, loss_of = self.functions
        x = embedding(self.input, self.weights["emb"], self.weights["in"])
        state, counts = x[:, :self.c["R"]] * 0.0, []
        for l, weights in enumerate(self.layers):
            x, state, count = block(self.c, x, state, self.beta[l], self.place, weights)
            counts.append(count)
        loss = loss_of(x, self.labels, self.weights["norm"], self.weights["emb"]) * self.share
        loss.backward()
        grads = [self.weights[key].grad for key in self.wide]
        into = [self.added[key] for key in self.wide]
        (torch._foreach_copy_ if first else torch._foreach_add_)(into, grads)
        for key in self.wide:
            self.weights[key].grad = None
        self.counts.add_(torch.stack(counts))
        self.loss.add_(loss.detach())

    def step(self, batch, balance=True):
        self.loss.zero_()
        self.counts.zero_()
        for index, (tokens, labels) in enumerate(batch):
            self.input.copy_(tokens, non_blocking=True)
            self.labels.copy_(labels, non_blocking=True)
            self.replays[index > 0].replay() if self.replays else self.micro_batch(index == 0)
        if self.sums.data_ptr() != self.grad.data_ptr():
            self.grad[:self.narrow].copy_(self.sums)
        # Clipping costs no pass: the fused kernel divides by the scale as it reads.
        self.optimizer.grad_scale = (torch.linalg.vector_norm(self.grad) + 1e-6).clamp_min(1.0)
        self.optimizer.step()
        self.finish()
        self.steps += 1
        if balance:
            share = self.counts[:, :-1] / self.counts.sum(1, keepdim=True) - 1.0 / self.c["E"]
            self.moments[0].lerp_(share, 0.1)
            self.moments[1].lerp_(share * share, 0.001)
            m, v = self.moments[0] / (1 - 0.9 ** self.steps), self.moments[1] / (1 - 0.999 ** self.steps)
            self.beta[:, :-1] -= 1e-3 * m / (v.sqrt() + 1e-8)

    def load(self, tensors):
        for names, into in self.names.values():
            if names:
                into.copy_(torch.cat([tensors["model." + name].float().reshape(-1) for name in names]).view(into.shape))
        for l in range(self.c["L"]):
            self.beta[l] = tensors[f"model.layers.{l}.mlp.gate.balancing_biases"]
        self.finish()

    def compile(self):
        torch._dynamo.config.cache_size_limit = 16
        self.functions = [torch.compile(f, fullgraph=True, dynamic=False) for f in (embed, layer, head)]

    def capture(self, stream):
        graphs, pool = [], None
        for first in (True, False):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.micro_batch(first)
            graphs, pool = graphs + [graph], graph.pool()
        self.replays = graphs


@contextlib.contextmanager
def limit(seconds):
    """Raises TimeoutError in what takes longer."""
    def late(*_):
        raise TimeoutError(f"more than {seconds:.0f} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(max(1, int(seconds)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def batches(asked, c, device):
    generator = torch.Generator().manual_seed(7)
    for _ in range(asked.steps):
        step = []
        for _ in range(asked.micro_batches):
            tokens = torch.randint(1, c["V"], (asked.tokens // DOCUMENT, DOCUMENT), generator=generator)
            tokens[:, -1] = 0
            labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], 1)
            step.append(tuple(t.view(-1).pin_memory() if device.type == "cuda" else t.view(-1) for t in (tokens, labels)))
        yield step


def run(asked, row, left):
    c, device = SHAPES[asked.model] | (dict(L=1) if asked.warm else {}), torch.device(asked.device)
    dtype, cuda = {"bf16": torch.bfloat16, "f32": torch.float32}[asked.dtype], device.type == "cuda"
    name = f"{asked.model} {asked.dtype} {asked.tokens} x {asked.micro_batches} row {row}"
    used, skipped = [], {}
    wait = torch.cuda.synchronize if cuda else lambda: None

    def attempt(what, seconds, work, undo):
        begin = time.perf_counter()
        try:
            with limit(seconds):
                work()
                wait()
            used.append(what)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # whatever it is, the run goes on without
            undo()
            for weight in model.weights.values():
                weight.grad = None
            skipped[what] = f"{type(fault).__name__}: {str(fault).strip().splitlines()[0][:300] if str(fault) else ''}"
        say(what="prepared", run=name, step=what, seconds=round(time.perf_counter() - begin, 1), failed=skipped.get(what))

    def warm():
        model.input.copy_(data[0][0][0])
        model.labels.copy_(data[0][0][1])
        for first in (True, False):
            model.micro_batch(first)

    def plain():
        model.functions = embed, layer, head

    # All on one stream, which a graph can be captured from: gradients are added on the stream where their weights were made.
    stream = torch.cuda.Stream() if cuda else None
    with torch.cuda.stream(stream) if cuda else contextlib.nullcontext():
        model = Model(c, asked.tokens, asked.micro_batches, device, dtype, row)
        if asked.weights:
            from safetensors.torch import load_file
            model.load({k: v for path in sorted(pathlib.Path(asked.weights).glob("*.safetensors")) for k, v in load_file(path).items()})
        data = list(batches(asked, c, device))
        if asked.compile:
            attempt("compile", min(asked.compile_seconds, left()), lambda: (model.compile(), warm()), plain)
            if "compile" not in used and "TimeoutError" not in skipped["compile"] and cuda:
                global ATTENTION
                ATTENTION = "varlen_attn"
                torch._dynamo.reset()
                attempt("compile with varlen_attn", min(asked.compile_seconds, left()), lambda: (model.compile(), warm()), plain)
        if asked.warm:
            return
        if not used:
            attempt("eager", left(), warm, lambda: None)
            if "eager" not in used:
                return
        if cuda and asked.graph:
            torch.cuda.empty_cache()
            attempt("graph", min(60, left()), lambda: model.capture(stream), lambda: setattr(model, "replays", None))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, losses = [], []
        for batch in data:
            if seconds and left() < 2 * seconds[-1] + 1:
                break
            begin = time.perf_counter()
            model.step(batch)
            losses.append(model.loss.item())
            seconds.append(time.perf_counter() - begin)
            if len(losses) == 1:
                say(what="first step", run=name, loss=losses[0], seconds=round(seconds[0], 3))
    rates = sorted(asked.tokens * asked.micro_batches / s for s in seconds[2:] or seconds)
    memory = dict(allocated=torch.cuda.max_memory_allocated() / 2**30, reserved=torch.cuda.max_memory_reserved() / 2**30) if cuda else {}
    say(what="speed", run=name, tokens_per_second=round(statistics.median(rates)), least=round(rates[0]), most=round(rates[-1]), steps=len(rates),
        losses=[round(loss, 4) for loss in losses[:6]], used=used, skipped=skipped, **{key: round(v, 1) for key, v in memory.items()},
        most_of_an_expert=round((model.counts.max(1).values / model.counts.sum(1)).max().item(), 3))


def check():
    """The same weights, tokens and step as transformers' model, in f32 on the CPU."""
    from transformers import ZayaConfig, ZayaForCausalLM
    torch.manual_seed(0)
    c, documents, length = SHAPES["zaya1-nano"], 6, 32
    rope = dict(rope_type="default", rope_theta=c["theta"], partial_rotary_factor=0.5)
    theirs = ZayaForCausalLM(ZayaConfig(
        vocab_size=c["V"], hidden_size=c["D"], num_hidden_layers=c["L"], num_attention_heads=c["H"], num_key_value_heads=c["KH"],
        head_dim=c["d"], moe_intermediate_size=c["I"], num_experts=c["E"], router_hidden_size=c["R"], max_position_embeddings=4096,
        rms_norm_eps=EPS, use_cache=False, pad_token_id=None, tie_word_embeddings=True,
        rope_parameters={"hybrid": rope, "hybrid_sliding": rope}, attn_implementation="eager", experts_implementation="eager")).float()
    with torch.no_grad():                                                   # nothing may stay at a value that hides a fault
        for name, weight in theirs.named_parameters():
            spread = 0.3 if "router_mlp" in name else 0.2 if weight.dim() == 1 else 0.05
            weight.copy_(torch.randn_like(weight) * spread + (1.0 if weight.dim() == 1 and "bias" not in name else 0.0))
        for name, bias in theirs.named_buffers():
            if name.endswith("balancing_biases"):
                bias.copy_(torch.randn_like(bias) * 0.02)                   # some tokens skip
    ours = Model(c, documents * length, 1, torch.device("cpu"), torch.float32, "A", document=length)
    ours.load(theirs.state_dict())
    tokens = torch.randint(1, c["V"], (documents, length))
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], 1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    worst = 0.0
    for step in range(3):
        loss = theirs(input_ids=tokens, labels=tokens).loss
        loss.backward()
        size = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        ours.step([(tokens.view(-1), labels.view(-1))], balance=False)
        optimizer.step()
        optimizer.zero_grad()
        off = abs(ours.loss.item() - loss.item()) / abs(loss.item())
        worst = max(worst, off)
        say(what="check", steps_before=step, loss=ours.loss.item(), transformers=loss.item(), apart=off, gradient_norm=size.item(),
            skipped=int(ours.counts[:, -1].sum()))
    assert worst <= 1e-5, f"losses are {worst:.1e} apart"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="zaya1-1b")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, a multiple of 128")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rows", default="A", help="A: gradients are summed in f32; B: in bf16; A,B: both")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120, help="for all of it")
    parser.add_argument("--compile-seconds", type=float, default=90)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--weights", help="a folder of `ztrain export`")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--warm", metavar="TOKENS,..", help="only compile, for micro-batches of these sizes, into the compiler's cache")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.check:
        return check()
    say(what="start", torch=torch.__version__, device=torch.cuda.get_device_name() if asked.device != "cpu" else "cpu")
    for row in asked.warm.split(",") if asked.warm else asked.rows.split(","):
        if asked.warm:
            asked.tokens, asked.micro_batches, asked.steps, row = int(row), 1, 1, "A"
        for _ in range(2):
            try:
                run(asked, row, lambda: asked.seconds - (time.perf_counter() - START))
                break
            except Exception as fault:
                memory = isinstance(fault, torch.OutOfMemoryError)
                say(what="failed", row=row, tokens=asked.tokens, why=f"{type(fault).__name__}: {str(fault)[:500]}")
            if not memory:
                break
            # The same tokens a step in smaller micro-batches.
            asked.tokens, asked.micro_batches = asked.tokens // 2, asked.micro_batches * 2
            torch.cuda.empty_cache()
        if asked.device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
