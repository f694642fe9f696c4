//! Fear: that an error of libtorch ends in a panic, or does not say where it happened.

use contract::Class;
use loader::{OpenedCurriculum, RankSlice};
use tch::Device;
use trainer::RunSpec;
use trainer::replay::{Executor as _, ThisMachine};
use trainer::state::State;
use trainer::state::ownership::Ownership;
use trainer::step::{self, Detail};
use trainer::workers::Workers;

use crate::support::{Scratch, table};

#[test]
fn a_micro_batch_that_cannot_be_computed_says_which_and_why() {
    table();
    let scratch = Scratch::new();
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let owners = Ownership::new(&spec, 0, 1);
    let mut state = State::begin(&spec, Device::Cpu, owners, Workers::new(2)).unwrap();
    // The first layer's query projection loses a column, so every matmul with it fails.
    let broken = spec.parameters.iter().position(|one| one.name.contains("q_proj.weight")).unwrap();
    state.weights[broken] = state.weights[broken].narrow(1, 0, 15).contiguous();
    let batch = loader::batch(&spec.plan, &spec.data, 7, RankSlice::WHOLE).unwrap();
    for workers in [1, 3] {
        let workers = Workers::new(workers);
        let whole = step::alone(&spec, workers, |cx| {
            ThisMachine
                .compute(cx, &state, &batch, Detail::Sums)?
                .read(cx, &state.owners)
                .map(|_| ())
        });
        let alone = step::micro_batch_alone(&spec, &state, &batch, 3, workers).map(|_| ());
        for (answer, place) in
            [(whole, "step 7, micro-batch 0:"), (alone, "step 7, micro-batch 3:")]
        {
            let fault = answer.unwrap_err();
            assert_eq!(fault.class(), Class::Machine, "{fault}");
            for word in [place, "libtorch", "15"] {
                assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
            }
        }
    }
}
