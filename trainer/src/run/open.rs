//! Finds the step to resume from: rank 0 takes the folder and searches the newest checkpoint that every rank can read.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use contract::{Digest, Fault, Result, counted};
use kernels::group::TransportChoice;
use loader::OpenedCurriculum;
use serde_json::json;
use store::Location;
use tch::Device;

use super::World;
use super::agree::{idle_ranks, meshes};
use super::keep::CheckpointWriter;
use super::record::{Recorder, RunRecords};
use super::recover::Recovery;
use super::replicas::Replicas;
use super::restore::{self, RestoreInputs, Restored};
use crate::checkpoint::{Checkpoints, GO_ON, OTHER_VERSION, StateLayout, UsableCheckpoint};
use crate::events::{self, Events, RanksEvent};
use crate::exec::ExecOptions;
use crate::folder::{OpenRun, RunFolder};
use crate::hf::InitialModel;
use crate::ledger::RESTORE;
use crate::mesh::words::{WordReader, WordWriter};
use crate::mesh::{Mesh, ProcessMesh, copies, share};
use crate::metrics::{self, Metrics};
use crate::progress::ProgressPrinter;
use crate::refusal::{lost, refused};
use crate::spec::RunSpec;
use crate::state::State;
use crate::state::ownership::{Ownership, ParamShard};
use crate::step;
use crate::waiting::expected;

/// An opened run, new or resumed.
pub(super) struct OpenedRun<'a> {
    pub(super) state: State,
    /// The state's digest; `None` before the first step.
    pub(super) digest: Option<Digest>,
    pub(super) recorder: Recorder<'a>,
    pub(super) keeper: CheckpointWriter<'a>,
    /// Whether the state was restored from the memory of the ranks.
    pub(super) from_memory: bool,
}

/// What remains after ranks were lost or joined.
pub(super) struct Resume<'a> {
    pub(super) recovery: Option<Recovery>,
    pub(super) replicas: &'a Replicas,
}

/// Opens the run's folder, and reads this rank's part of the state.
pub(super) fn open<'a>(
    spec: &'a RunSpec,
    opened: &OpenedCurriculum,
    exec: &'a ExecOptions,
    world: &'a World,
    team: &ProcessMesh<'_>,
    chosen: &TransportChoice,
    Resume { recovery, replicas }: Resume<'_>,
) -> Result<OpenedRun<'a>> {
    let (comm, layout) = (&world.comm, Arc::new(StateLayout::new(spec, world.device)));
    let owners = Ownership::new(spec, comm.rank(), comm.world());
    let reading = RestoreInputs { team, layout: &layout, owners: &owners, workers: exec.workers };
    let recall = |last, place: &Location| {
        hold_together(exec, world, place)?;
        let restore = |_| replicas.restore(team, &layout, &owners, last, exec.workers);
        recovery.as_ref().map_or(Ok(None), restore)
    };
    let (mut from_memory, mut drawn) = (true, None);
    let (found, book, checkpoints) = if comm.rank() == 0 {
        // Read first: if the initial weights are unreadable, no run's folder is created.
        if spec.start.is_some() && !RunFolder::new(&exec.out).ledger().exists() {
            drawn = Some(State::begin(spec, world.device, owners.clone(), exec.workers)?);
        }
        let mut opening = Opening::new(spec, opened, exec, world, recovery.as_ref())?;
        let checkpoints = opening.checkpoints.clone();
        let found = match recall(opening.open.ledger.last_step(), &checkpoints.place())? {
            Some(found) => {
                opening.compare(&found)?;
                // The other ranks write as soon as they have the choice.
                opening.put_in_order()?;
                reading.choose(found.0.step, &checkpoints.place())?;
                Some(found)
            }
            None => {
                from_memory = false;
                let found =
                    opening.newest(&reading).and_then(|found| opening.set_aside_unusable(found))?;
                opening.put_in_order()?;
                found
            }
        };
        let mut book = opening.begin(found.as_ref().map_or(0, |(state, _)| state.step))?;
        if comm.world() > 1 {
            note_ranks(&mut book, team, chosen, owners.pieces())?;
        }
        if let (Some((state, _)), Some(start), None) = (&found, &spec.start, &recovery) {
            look_at_start(start, state.step, &book.progress)?;
        }
        book.recovery = recovery.map(|recovery| (recovery, from_memory));
        (found, Some(book), checkpoints)
    } else if let Some(found) = recall(0, &restore::nowhere())? {
        let (_, place) = reading.choose(0, &restore::nowhere())?;
        (Some(found), None, Checkpoints::new(place))
    } else {
        from_memory = false;
        reading.follow().map(|(found, checkpoints)| (found, None, checkpoints))?
    };
    let (state, digest) = match (found, drawn) {
        (Some((state, digest)), _) => (state, Some(digest)),
        (None, drawn) => {
            let begin = || State::begin(spec, world.device, owners, exec.workers);
            let state = drawn.map_or_else(begin, Ok)?;
            share::weights(team, &state)?;
            (state, None)
        }
    };
    let on_disk = if from_memory { 0 } else { state.step };
    let keeper = CheckpointWriter::new(comm, layout, checkpoints, exec, on_disk)?;
    Ok(OpenedRun { state, digest, recorder: Recorder(book), keeper, from_memory })
}

/// Every rank joins rank 0's locks, as far as its machine sees the files: after the loss of a rank, no other run can
/// take the folder or the `place` of the checkpoints.
fn hold_together(exec: &ExecOptions, world: &World, place: &Location) -> Result<()> {
    let mut own = WordWriter::default();
    own.text(world.locks.group()).place(place);
    let gathered = world.comm.all_gather("the holding of the folder", own.bytes()).map_err(lost)?;
    let mut gathered = WordReader::new(&gathered[0]);
    world.locks.join(&gathered.text()?, &exec.out, &gathered.place()?)
}

/// Warns if the initial weights of a run that resumes after `step` has changed or is missing: only step 0 needs it.
fn look_at_start(start: &InitialModel, step: u64, progress: &ProgressPrinter) -> Result<()> {
    let folder = start.folder().display();
    let what = match start.folder().exists() {
        false => format!("{folder} does not exist"),
        true => match start.changed()? {
            Some(file) => format!("{} is not what was imported", file.display()),
            None => return Ok(()),
        },
    };
    progress.note(&format!(
        "warning: the initial weights of this run: {what}; the run continues after step {step} without them, and cannot \
         be computed again from its first step until they are put back, or named anew by `init_from` in the curriculum"
    ));
    Ok(())
}

/// Records the ranks.
fn note_ranks(
    book: &mut RunRecords<'_>,
    team: &ProcessMesh<'_>,
    chosen: &TransportChoice,
    pieces: &[ParamShard],
) -> Result<()> {
    let (world, transport) = (team.group.world(), if chosen.rccl { "rccl" } else { "gloo" });
    let mesh: Vec<_> = meshes(book.spec, world, team.degrees)
        .into_iter()
        .map(
            |(phase, Mesh { dp, cp, tsp })| json!({"phase": phase, "dp": dp, "cp": cp, "tsp": tsp}),
        )
        .collect();
    let bytes_replicated = if book.exec.replicate { copies::sent(pieces) } else { 0 };
    let more = [
        ("mesh", json!(mesh)),
        ("nodes", json!(team.nodes.sizes())),
        ("rccl_release", json!(chosen.release)),
        ("no_rccl_because", json!(chosen.reason)),
        ("bytes_replicated", json!(bytes_replicated)),
    ];
    let event = RanksEvent {
        world,
        degrees: team.degrees,
        grad_reduce: team.grad_reduce,
        transport: transport.to_owned(),
        more: more.map(|(name, value)| (name.to_owned(), value)).into_iter().collect(),
    };
    book.events.write(RanksEvent::NAME, json!(event))?;
    book.progress.note(&format!("{world} ranks, tensors by {}", chosen.words()));
    idle_ranks(book.spec, world, team.degrees).iter().for_each(|note| book.progress.note(note));
    Ok(())
}

/// A run's folder that was taken, before the step to resume from is known.
struct Opening<'a> {
    spec: &'a RunSpec,
    exec: &'a ExecOptions,
    world: &'a World,
    open: OpenRun,
    checkpoints: Checkpoints,
    events: Events,
    progress: ProgressPrinter,
    /// Checkpoints of steps that are not in the ledger.
    beyond: SkippedCheckpoints,
}

/// Checkpoints that cannot be used: steps and reasons.
type SkippedCheckpoints = Vec<(u64, Fault)>;

impl<'a> Opening<'a> {
    /// Takes the folder.
    fn new(
        spec: &'a RunSpec,
        opened: &OpenedCurriculum,
        exec: &'a ExecOptions,
        world: &'a World,
        recovery: Option<&Recovery>,
    ) -> Result<Self> {
        let folder = RunFolder::new(&exec.out);
        // A hung rank may hold the folder until it is killed.
        let patience = recovery.map_or(Duration::ZERO, |recovery| recovery.patience);
        let (runtime, locks) = (&world.runtime, &world.locks);
        let open = folder.open(spec, &opened.file, runtime, locks, patience, exec.restart)?;
        let mut events = Events::open(&folder.events())?;
        let recorded = open.ledger.last_step();
        recovery.map_or(Ok(()), |recovery| recovery.record(&mut events, recorded))?;
        let checkpoints =
            open.take_checkpoints(exec.checkpoints.as_ref(), &world.locks, patience)?;
        let progress = ProgressPrinter::new(spec.plan.steps(), exec.progress);
        let beyond = checkpoints.steps()?.into_iter().filter(|step| *step > recorded).map(|step| {
            let what = format!("the ledger next to it ends with step {recorded}");
            (step, Fault::data(what).at(checkpoints.location(step).to_string()))
        });
        let beyond = beyond.collect();
        Ok(Opening { spec, exec, world, open, checkpoints, events, progress, beyond })
    }

    /// Compares a state that was restored from memory with the ledger.
    fn compare(&self, restored: &Restored) -> Result<()> {
        let (state, digest) = restored;
        if state.step == 0 {
            return Ok(());
        }
        let wanted = self.open.ledger.record(state.step)?.state_digest;
        match *digest == wanted {
            true => Ok(()),
            false => Err(Fault::mismatch(format!(
                "the copies of the state after step {} differ from it",
                state.step
            ))
            .at("--replicate")
            .found(digest)
            .wanted(wanted)
            .hint("the same command continues from the last checkpoint")),
        }
    }

    /// The newest checkpoint that all ranks can read together.
    fn newest(&self, reading: &RestoreInputs<'_>) -> Result<UsableCheckpoint<Restored>> {
        let ledger = &self.open.ledger;
        reading.lead(
            &[&self.checkpoints],
            ledger.last_step(),
            |step| ledger.chain_at(step),
            |_| Ok(()),
        )
    }

    /// Warns about checkpoints that cannot be used, and renames them, so that the retention does not count them as the
    /// newest. If there is no other state, nothing is renamed and the run stops, except with `--restart`.
    fn set_aside_unusable<T>(&mut self, found: UsableCheckpoint<T>) -> Result<Option<T>> {
        let mut passed = std::mem::take(&mut self.beyond);
        passed.extend(found.passed);
        let newest = passed.iter().max_by_key(|(step, _)| *step);
        if let (None, Some((newest, fault)), false) = (&found.state, newest, self.exec.restart) {
            let hint = if fault.what() == OTHER_VERSION { GO_ON } else { RESTORE };
            let all: Vec<String> = passed.iter().map(|(step, _)| format!("step-{step}")).collect();
            return Err(Fault::data(format!(
                "none of this run's checkpoints can be used: {}",
                all.join(", ")
            ))
            .at(self.checkpoints.place().to_string())
            .found(format!("step-{newest}: {}", fault.to_string().replace('\n', "\n  ")))
            .hint(hint));
        }
        if let (None, true, false) = (&found.state, passed.is_empty(), self.exec.restart)
            && self.open.ledger.last_step() > 0
            && let Some(step) = events::kept(&self.open.folder.events())
        {
            let bare = self.checkpoints.without_manifest()?;
            let bare: Vec<String> = bare.iter().map(|step| format!("step-{step}")).collect();
            let found = match bare.is_empty() {
                true => "no checkpoint".to_owned(),
                false => {
                    format!("no checkpoint, and files without their manifest: {}", bare.join(", "))
                }
            };
            return Err(Fault::data("this run's checkpoints are missing")
                .at(self.checkpoints.place().to_string())
                .found(found)
                .wanted(format!("step-{step}, by {}", self.open.folder.events().display()))
                .hint(RESTORE));
        }
        for (step, fault) in &passed {
            self.pass_over(*step, fault)?;
        }
        Ok(found.state)
    }

    /// Removes incomplete checkpoints, now that the run can no longer be refused. A checkpoint that the events know and
    /// the retention keeps was complete, so it is damaged instead.
    fn put_in_order(&mut self) -> Result<()> {
        let mut lost = self.checkpoints.without_manifest()?;
        if !lost.is_empty() {
            let known = events::checkpoints(&self.open.folder.events());
            lost.retain(|step| known.contains(step));
        }
        let pinned = self.checkpoints.pinned()?;
        let mut all: BTreeSet<u64> =
            lost.iter().copied().chain(self.checkpoints.steps()?).collect();
        all.retain(|step| !pinned.contains(step));
        let gone = self.exec.retention.gone(&all.into_iter().collect::<Vec<_>>());
        for step in lost.into_iter().filter(|step| !gone.contains(step)) {
            let place = self.checkpoints.location(step).to_string();
            self.pass_over(step, &Fault::data("its manifest is missing").at(place))?;
        }
        // Leftovers are overwritten later, or ignored.
        if let Err(why) = self.checkpoints.clean() {
            self.progress.note(&format!(
                "warning: half written checkpoints cannot be removed, and take disk space: {why}"
            ));
            self.events.write("not removed", json!({"fault": why.to_string()}))?;
        }
        Ok(())
    }

    fn pass_over(&mut self, step: u64, fault: &Fault) -> Result<()> {
        self.progress.note(&format!("warning: checkpoint step-{step} is passed over: {fault}"));
        let fields = json!({"step": step, "fault": fault.to_string()});
        self.events.write("damaged checkpoint", fields)?;
        self.checkpoints.set_aside(step)
    }

    /// Starts the run, or resumes it after step `from`.
    fn begin(self, from: u64) -> Result<RunRecords<'a>> {
        let Opening { spec, exec, world, open, checkpoints: _, mut events, progress, beyond: _ } =
            self;
        let mut metrics = Metrics::open(&open.folder.metrics(), from)?;
        let word = if from == 0 { "begins:" } else { "continues:" };
        let (id, recorded) = (open.ledger.id(), open.ledger.last_step());
        progress.note(&format!("{word} {}", describe(spec, exec, world, id, from)));
        if from < recorded {
            let (steps, they) = match from + 1 {
                first if first == recorded => (format!("step {first} is"), "it is"),
                first => (format!("steps {first} to {recorded} are"), "they are"),
            };
            let time = expected(&open.folder.events(), recorded - from);
            let about = time.map_or_else(String::new, |time| format!(", about {time}"));
            progress.note(&format!(
                "{steps} in the ledger: {they} computed again, to the same bits{about}"
            ));
        }
        for word in &open.by_hand {
            let path = open.folder.curriculum();
            progress.note(&format!(
                "{}: {word} is not what the recorded steps were trained by, and was put right",
                path.display()
            ));
        }
        for edit in &open.edits {
            progress.note(&format!("accepted edit of the curriculum: {edit}"));
            events.write("edit", json!({"edit": edit, "recorded": recorded}))?;
        }
        // Only recorded here: results on a GPU do not depend on it.
        let processor = kernels::runtime::processor().map_err(refused)?;
        let fields = json!({
            "from_step": from, "recorded": recorded, "run": id,
            "device": device_name(world.device), "workers": exec.workers.count(), "pid": std::process::id(),
            "kernels": world.runtime.fingerprint(), "processor": processor, "options": exec.options,
            "gpu": kernels::device::identity(world.device)
                .map(|[name, uuid]| json!({"name": name, "uuid": uuid})),
        });
        events.write("start", fields)?;
        if let Some(command) = &exec.metrics_exec {
            // It outlives a loss of ranks: the run does not wait for it, and it is not started twice.
            if world.feed.get().is_none() {
                let feed = metrics::feed(command, open.folder.root(), spec, recorded)?;
                let _ = world.feed.set(feed);
            }
            world.feed.get().into_iter().for_each(|feed| metrics.feed(Arc::clone(feed)));
        }
        let peak = metrics::peak(world.device, spec.curriculum.dtype);
        Ok(RunRecords {
            spec,
            exec,
            open,
            events,
            metrics,
            progress,
            recovery: None,
            again: 0,
            peak,
        })
    }
}

/// A device by its name in --device.
fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(number) => format!("cuda:{number}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn describe(spec: &RunSpec, exec: &ExecOptions, world: &World, id: Digest, from: u64) -> String {
    let parameters = step::parameter_count(spec.config());
    let shown = world.runtime.levels();
    let rest = match shown.contains(&"L0") {
        true => "",
        false => "; training bits: not shown on this device, `sh tests/device.sh` may show them",
    };
    format!(
        "run {} | after step {from} of {} | {:.1}M parameters | {} on {} | levels {}{rest}",
        id.short(),
        spec.plan.steps(),
        parameters as f64 / 1e6,
        counted(exec.workers.count(), "worker"),
        device_name(world.device),
        shown.join(", "),
    )
}
