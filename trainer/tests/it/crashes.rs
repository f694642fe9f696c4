//! Fear: that a power loss removes steps that a checkpoint relies on, or leaves a run that cannot continue.

use storage::crash::Recording;

use crate::support::{Scratch, is_full, stop_after};

/// Power is lost at any write of ledger, checkpoints or other files of a run, from its start or after a resume.
/// Whatever was synced or lost, the same command trains to the end, and every line equals that of an undisturbed run.
#[test]
fn a_run_goes_on_after_any_loss_of_power() {
    let undisturbed = Scratch::new();
    undisturbed.train("run");
    let whole = undisturbed.ledger("run");
    let scratch = Scratch::new();
    let (root, path) = (scratch.path(""), scratch.path("run.toml"));
    let (mut anew, mut further) = (0, 0);
    let states = if is_full() { 60 } else { 8 };
    for steps in [4, 8] {
        let (recording, trained) =
            Recording::of(&root, || scratch.run(&path, "run", stop_after(steps)));
        assert_eq!(trained.unwrap().step, steps);
        assert!(recording.acts() > 40, "{}", recording.acts());
        recording.each(states, |state| {
            let begun = scratch.path("run/checkpoints/step-3/manifest.json").exists();
            *(if begun { &mut further } else { &mut anew }) += 1;
            let trained = scratch.run(&path, "run", |_| ());
            assert_eq!(trained.unwrap_or_else(|fault| panic!("{}: {fault}", state.told)).step, 10);
            assert!(scratch.ledger("run") == whole, "{}", state.told);
        });
        // The next part starts from an intact run.
        std::fs::remove_dir_all(scratch.path("run")).unwrap();
        scratch.run(&path, "run", stop_after(steps)).unwrap();
    }
    assert!(anew > 2 && further > 5, "{anew} {further}");
}
