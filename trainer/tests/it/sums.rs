//! Fear: that the sums and norms of a ledger line are not what their names say. Each is recomputed here from whole
//! tensors and documents, in f64.

use tch::{Device, Kind, Tensor};
use trainer::ledger::{Packed, layers};
use trainer::replay::{Executor as _, Replayer, ThisMachine};
use trainer::state::State;
use trainer::step::{self, Detail};
use trainer::workers::Workers;

use crate::support::{Scratch, table};

fn squares(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])
}

/// Compares packed norms by layer with sums of squares by tensor.
fn assert_norms(found: &Packed, squares: &[f64], names: &[String], precise: f64) {
    let layers = layers(names);
    assert_eq!(found.0.len(), layers.len());
    for (found, layer) in found.values().zip(layers) {
        let wanted = squares[layer.parameters].iter().sum::<f64>().sqrt();
        assert!((found - wanted).abs() <= precise * wanted, "{}: {found} {wanted}", layer.name);
    }
}

/// The gradient of the step after `state`, computed on one rank, as sums of squares by tensor.
fn gradient(replayer: &Replayer, state: &State) -> Vec<f64> {
    let (spec, step) = (replayer.spec(), state.step + 1);
    let batch = loader::batch(&spec.plan, &spec.data, step, loader::RankSlice::WHOLE).unwrap();
    let gradient = step::alone(spec, Workers::new(1), |cx| {
        ThisMachine.compute(cx, state, &batch, Detail::Sums)?.read(cx, &state.owners)
    });
    let gradient = gradient.unwrap();
    let mut found = vec![0.0; spec.parameters.len()];
    for (piece, own) in state.owners.own().zip(&gradient.own) {
        found[piece.tensor] += squares(own);
    }
    found
}

#[test]
fn norms_by_layer_are_norms_and_sums_by_source_are_those_of_its_documents() {
    let scratch = Scratch::new();
    scratch.train("run");
    let open = || Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2));
    let mut replayer = open().unwrap();
    let names = replayer.spec().names();
    for step in [1, 4, 8] {
        let mut state = replayer.state_after(step - 1).unwrap();
        let before: Vec<Tensor> = state.weights.iter().map(Tensor::copy).collect();
        let gradient = gradient(&replayer, &state);
        let found = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
        let (record, documents) = (found.replayed.record.unwrap(), found.documents);
        assert_norms(&record.layer_gradient_norms, &gradient, &names, 1e-9);
        let moved = before.iter().zip(&state.weights);
        let moved: Vec<f64> = moved.map(|(old, new)| squares(&(new - old))).collect();
        assert!(moved.iter().sum::<f64>() > 0.0);
        assert_norms(&record.layer_update_norms, &moved, &names, 1e-9);
        assert_eq!(
            record.sources.values().map(|source| source.labels).sum::<u64>(),
            record.label_count
        );
        for (name, source) in &record.sources {
            let own = documents.iter().filter(|document| document.source == *name);
            let sums = own.map(|document| (document.labels, document.loss));
            let (labels, loss) = sums.fold((0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            assert_eq!(source.labels, labels, "{name}");
            assert!((source.loss.float() - loss).abs() <= 1e-6 * loss, "{name}");
        }
    }
}
