//! Rows of experts next to a norm.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::super::device::DeviceTable;
use super::super::*;
use super::{EMULATED, float, random};

/// [`EMULATED`] with our own matmuls of experts at all widths.
const OWN_EXPERTS: OpsTable = &DeviceTable::on(crate::device::emulated::queue, Some(false));

type Returned = (ResidualGrads, ParamGradient);

/// All gradients, finished.
fn all(table: OpsTable, back: Returned) -> Vec<Tensor> {
    let (found, weight) = back;
    let ResidualGrads { branch, gates, residual, scaling } = found;
    let mut all = table.finish(scaling.into_iter().chain([weight]).collect()).unwrap();
    all.extend([branch, residual].into_iter().chain(gates));
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Rows are moved by a kernel of their own only where four elements cannot be read at once.
    #[test]
    fn a_norm_that_moves_rows_has_the_bits_of_moving_them_first(
        choice in prop::collection::vec(0i64..4, 0..70),
        width in prop_oneof![(1i64..12).prop_map(|fours| 4 * fours), 1i64..40],
        identity in any::<bool>(),
        bypassed in any::<bool>(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (tokens, experts) = (choice.len() as i64, 3);
        let choice = Tensor::from_slice(&choice);
        let [entered, grad, other] = [0, 1, 2].map(|index| random(&[tokens, width], seed + index).to_kind(kind));
        let [stream, beside] = [3, 4].map(|index| random(&[tokens, width], seed + index));
        let gates = random(&[tokens, 1], seed + 5);
        let [weight, scale, bias, residual_scale, residual_bias] =
            [6, 7, 8, 9, 10].map(|index| random(&[width], seed + index));
        let by = ResidualScaling {
            scale: &scale,
            bias: &bias,
            residual_scale: &residual_scale,
            residual_bias: &residual_bias,
        };
        for table in [CPU, REFERENCE, EMULATED] {
            let order = table.dispatch(&choice, experts + 1).unwrap();
            // What no token has is never read.
            let nothing = Tensor::full([order.rows, width], f64::NAN, (kind, Device::Cpu));
            let x = nothing.index_copy(0, &order.places, &entered);
            let own = ExpertRows { x: &x, by: &order, passed: identity.then_some(&x), by_token: &gates };
            let branch = table.gather(own).unwrap();
            let wanted = table.residual_norm(&branch, &stream, by, &weight, 1e-5).unwrap();
            let found = table.residual_norm_gathered(own, &stream, by, &weight, 1e-5).unwrap();
            prop_assert_eq!(&found, &wanted);
            let [sum, _, factors] = &wanted;
            let norm = NormBack { x: sum, factors, weight: &weight, beside: bypassed.then_some(&beside) };

            let back = table.residual_norm_backward(&branch, &stream, by, norm, &grad).unwrap();
            let moved = table.gather_backward(own, &back.0.branch).unwrap();
            let found = table.residual_norm_gathered_backward(own, &stream, by, norm, &grad).unwrap();
            let [to_rows, to_gates] = moved;
            let back = (ResidualGrads { branch: to_rows, gates: Some(to_gates), ..back.0 }, back.1);
            prop_assert_eq!(all(table, found), all(table, back));

            let own = ExpertRows { by_token: &grad, ..own };
            let summed = table.unpermute(own).unwrap();
            let back = table.residual_norm_backward(&other, &stream, by, norm, &summed).unwrap();
            let found = table.residual_norm_unpermuted_backward(&other, &stream, by, norm, own);
            prop_assert_eq!(all(table, found.unwrap()), all(table, back));
        }
    }

    /// Matmuls of experts that read rows of tokens and compute SwiGLU, where a table has them.
    #[test]
    fn experts_in_one_launch_have_the_bits_of_several_operations(
        choice in prop::collection::vec(0i64..4, 1..90),
        wide in prop_oneof![(1i64..9).prop_map(|eights| 8 * eights), 1i64..70],
        narrow in prop_oneof![(1i64..9).prop_map(|eights| 8 * eights), 1i64..70],
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (tokens, experts) = (choice.len() as i64, 3);
        let of = |shape: &[i64], index| random(shape, seed + index).to_kind(kind);
        let (x, grad) = (of(&[tokens, wide], 0), of(&[tokens, wide], 1));
        let gate_up = of(&[experts, 2 * narrow, wide], 2);
        let down = of(&[experts, wide, narrow], 3);
        let routed: Vec<i64> = (0..tokens).filter(|token| choice[*token as usize] < experts).collect();
        let choice = Tensor::from_slice(&choice);
        for table in [CPU, EMULATED, OWN_EXPERTS] {
            let by = table.dispatch(&choice, experts + 1).unwrap();
            let used = by.places.index_select(0, &Tensor::from_slice(&routed));
            let of_experts = |x: &Tensor| x.index_select(0, &used);
            let first = |x: Tensor| x.narrow(0, 0, by.computed);
            let input = table.expert_input(&x, &by).unwrap();
            let reads_tokens = matches!(input, ExpertInput::Tokens(_));
            prop_assert!(reads_tokens || table.name() == CPU.name() || kind == Kind::Float || wide % 8 == 0);
            let sorted = first(table.permute(&x, &by).unwrap());
            let [both, product] = table.grouped_swiglu(&input, &gate_up, &by).unwrap();
            let wanted = first(table.grouped_matmul(&sorted, &gate_up, &by).unwrap());
            prop_assert_eq!(of_experts(&both), of_experts(&wanted));
            prop_assert_eq!(of_experts(&product), of_experts(&table.swiglu(&wanted).unwrap()));
            let grads = table.permute(&grad, &by).unwrap();
            let back = table.grouped_swiglu_backward(&grads, &down, &both, &by).unwrap();
            let inner = first(table.grouped_matmul_input(&grads, &down, &by).unwrap());
            prop_assert_eq!(of_experts(&back), of_experts(&table.swiglu_backward(&both, &inner).unwrap()));
        }
    }
}
