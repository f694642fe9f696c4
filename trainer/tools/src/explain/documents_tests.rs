//! Documents by themselves have the same gradients as in their rows, and these sum to the step's.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use tch::Kind;
use trainer::model::{self, ZayaConfig};

/// The rows of a batch.
struct Rows {
    tokens: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    mask: Vec<u8>,
    boundaries: Vec<Vec<u32>>,
}

const WIDTH: usize = 24;

fn config() -> ZayaConfig {
    let preset = ZayaConfig::preset("zaya1-nano").unwrap();
    ZayaConfig {
        vocab_size: 41,
        hidden_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        head_dim: 8,
        moe_intermediate_size: 16,
        num_experts: 3,
        router_hidden_size: 8,
        ..preset
    }
}

impl Rows {
    fn new(seed: u64, starts: &[BTreeSet<u32>]) -> Rows {
        let count = starts.len() * WIDTH;
        let key = contract::Key::from_seed(seed);
        let draw = |place: usize| contract::draw(key, contract::Purpose::Generate, place as u64);
        let boundaries: Vec<Vec<u32>> = starts
            .iter()
            .map(|starts| [0].into_iter().chain(starts.iter().copied()).collect())
            .collect();
        let mut positions = Vec::new();
        for starts in &boundaries {
            let start = |at: u32| starts.iter().rev().find(|start| **start <= at).copied();
            positions.extend((0..WIDTH as u32).map(|at| (at - start(at).unwrap_or(0)) as i32));
        }
        Rows {
            tokens: (0..count).map(|place| (draw(place) % 41) as i32).collect(),
            labels: (0..count).map(|place| (draw(place + count) % 41) as i32).collect(),
            positions,
            mask: (0..count).map(|place| u8::from(draw(place + 2 * count) % 5 > 0)).collect(),
            boundaries,
        }
    }

    fn input(&self) -> MicroBatchInput<'_> {
        let Rows { tokens, labels, positions, mask, boundaries } = self;
        MicroBatchInput {
            tokens,
            labels,
            positions,
            mask,
            boundaries,
            weights: &[],
            rows: boundaries.len(),
            seq_len: WIDTH,
        }
    }

    /// One document between each two boundaries; the last of the first row continues at the start of the last row.
    fn documents(&self) -> Vec<Vec<DocumentPlace>> {
        let mut found = Vec::new();
        for (row, starts) in self.boundaries.iter().enumerate() {
            let ends = starts.iter().skip(1).copied().chain([WIDTH as u32]);
            for (start, end) in starts.iter().zip(ends) {
                found.push(vec![DocumentPlace {
                    row: row as u64,
                    columns: *start..end,
                    first_token: 0,
                    infill: None,
                }]);
            }
        }
        if self.boundaries.len() > 1 {
            let last = found.iter().rposition(|places| places[0].columns.start == 0).unwrap();
            let moved = found.remove(last);
            let first = self.boundaries[0].len() - 1;
            found[first].extend(moved);
        }
        found
    }
}

fn gradient(input: &MicroBatchInput<'_>, label_count: u64) -> Vec<Tensor> {
    let config = config();
    let (params, balance) = (model::init(&config, 3).unwrap(), model::init_balance(&config));
    model::forward_backward(&config, &params, &balance, input, label_count).unwrap().grads
}

fn length(tensors: &[Tensor]) -> f64 {
    let squares = |tensor: &Tensor| tensor.square().sum(Kind::Double).double_value(&[]);
    tensors.iter().map(squares).sum::<f64>().sqrt()
}

fn apart(left: &[Tensor], right: &[Tensor]) -> f64 {
    length(&left.iter().zip(right).map(|(left, right)| left - right).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn a_document_alone_has_the_gradient_that_it_has_among_others(
        seed in 0u64..1000,
        starts in prop::collection::vec(prop::collection::btree_set(1u32..WIDTH as u32, 0..4), 1..4),
    ) {
        let rows = Rows::new(seed, &starts);
        let whole = rows.input();
        let label_count = rows.mask.iter().map(|mask| u64::from(*mask)).sum::<u64>().max(1);
        let step = gradient(&whole, label_count);
        let mut sum: Vec<Tensor> = step.iter().map(Tensor::zeros_like).collect();
        for places in rows.documents() {
            let mut mask = vec![0; rows.mask.len()];
            for place in &places {
                let columns = place.columns.start as usize..place.columns.end as usize;
                let own = columns.map(|column| place.row as usize * WIDTH + column);
                own.for_each(|at| mask[at] = rows.mask[at]);
            }
            // In their rows: the whole rows, with all other labels masked.
            let wanted = gradient(&MicroBatchInput { mask: &mask, ..whole }, label_count);
            for documents_apart in [true, false] {
                let alone = Isolated::of(&whole, &places, documents_apart);
                let found = gradient(&alone.input(), label_count);
                prop_assert!(apart(&found, &wanted) <= 1e-5 * length(&step));
                let labels = mask.iter().map(|mask| u64::from(*mask)).sum::<u64>();
                prop_assert_eq!(alone.mask.iter().map(|mask| u64::from(*mask)).sum::<u64>(), labels);
            }
            sum = sum.iter().zip(&wanted).map(|(sum, own)| sum + own).collect();
        }
        prop_assert!(apart(&sum, &step) <= 1e-5 * length(&step), "documents add up to the step");
    }

    /// The score counts excess losses of both signs and gradients.
    #[test]
    fn scores_add_up_and_a_cheap_document_with_a_long_gradient_comes_first(
        losses in prop::collection::vec(0.1..6.0f64, 4..12),
    ) {
        let document = |id: String, loss: f64| DocumentLoss {
            source: "web".into(), id, file: String::new(), row: 0, group: None, bytes: None, kept: BTreeMap::new(),
            sequences: Vec::new(), places: Vec::new(), loss_weight: None, tokens: 10, labels: 10, loss: 10.0 * loss, mean: loss,
        };
        let mut documents: Vec<DocumentLoss> =
            losses.iter().enumerate().map(|(index, loss)| document(index.to_string(), *loss)).collect();
        documents.push(document("repeated".into(), 0.01));
        let mut gradients = vec![DocumentGradient { squares: 0.01, dot: 0.01 }; losses.len()];
        gradients.push(DocumentGradient { squares: 9.0, dot: 6.0 });
        let ranked = rank(documents, &gradients, |_| 3.0, 8.0);
        prop_assert_eq!(&ranked[0].document.id, "repeated");
        prop_assert!((ranked.iter().map(|one| one.score).sum::<f64>() - 2.0).abs() < 1e-9);
        prop_assert!((ranked[0].alignment - 6.0 / 72f64.sqrt()).abs() < 1e-12);
    }
}
