//! Checks before training that all ranks train the same run in the same way and have the memory, and agrees on a
//! transport.

use contract::{Digest, Fault, Result, counted};
use kernels::group::TransportChoice;
use loader::OpenedCurriculum;
use mixer::Curriculum;

use super::World;
use crate::checkpoint::SnapshotOptions;
use crate::exec::ExecOptions;
use crate::memory::{self, MachineDemand};
use crate::mesh::words::{WordReader, WordWriter};
use crate::mesh::{Degrees, Mesh};
use crate::model::Cut;
use crate::refusal::lost;
use crate::spec::{PhaseModel, RunSpec};

/// Compares this rank with the others, and agrees with them on a transport. After a loss, the remaining ranks share
/// micro-batches as far as their number allows.
pub(super) fn join(
    spec: &RunSpec,
    exec: &ExecOptions,
    world: &mut World,
    after_loss: bool,
) -> Result<TransportChoice> {
    same(spec, &options(exec), world)?;
    if !after_loss {
        refuse_unshared(spec, world.comm.world(), exec.degrees)?;
    }
    let (names, me) = (world.comm.nodes(), world.comm.rank());
    memory::refuse(spec, exec.demand(), names, me, world.device)?;
    let chosen = world.comm.choose_transport(world.device, exec.transport);
    chosen.map_err(|error| match error {
        kernels::Error::Foreign { .. } => lost(error).hint(
            "ZTRAIN_RCCL names the library to open; without --transport rccl Gloo is taken where there is none",
        ),
        error => lost(error),
    })
}

/// Reduces the workers of `exec` to as many as fit into memory, and prints a note. If not even one fits, the run is
/// refused later, with its numbers.
pub fn fit_workers(exec: &mut ExecOptions, opened: &OpenedCurriculum, world: &World) -> Result<()> {
    let (spec, count) = (RunSpec::new(opened)?, exec.workers.count());
    let fits = |count: usize| {
        let demand = MachineDemand { workers: exec.workers.of(count), ..exec.demand() };
        let (names, me) = (world.comm.nodes(), world.comm.rank());
        memory::refuse(&spec, demand, names, me, world.device).is_ok()
    };
    let (mut most, mut too_many) = (0, count + 1);
    while too_many - most > 1 {
        let middle = most.midpoint(too_many);
        *(if fits(middle) { &mut most } else { &mut too_many }) = middle;
    }
    if (1..count).contains(&most) {
        let gib = exec.memory as f64 / f64::from(1 << 30);
        let workers = counted(count, "worker");
        contract::note!(
            "note: {most} of {workers}: for more the {gib:.1} GiB that this process may use are too few"
        );
        exec.workers = exec.workers.of(most);
    }
    Ok(())
}

/// The mesh of each phase.
pub(super) fn meshes(spec: &RunSpec, world: u32, degrees: Degrees) -> Vec<(&str, Mesh)> {
    let phases = spec.plan.phases().iter().filter_map(|phase| {
        let cut = spec.model_at(phase.first_step).ok()?.cut;
        Some((phase.name.as_str(), Mesh::of(world, degrees, cut)))
    });
    phases.collect()
}

/// Refuses `--cp` or `--tsp` if no phase can use them with this number of ranks.
pub fn refuse_unshared(spec: &RunSpec, world: u32, degrees: Degrees) -> Result<()> {
    let (meshes, Degrees { cp, tsp }) = (meshes(spec, world, degrees), degrees);
    let listed = |of: fn(&PhaseModel) -> u64| {
        spec.models.iter().map(|model| of(model).to_string()).collect::<Vec<_>>().join(", ")
    };
    let chunks = listed(|model| model.cut.chunks);
    // If the curriculum allows these degrees, the number of ranks is the problem.
    let enough = cp * tsp;
    let could = |along: fn(Mesh) -> u32| {
        spec.models.iter().any(|model| along(Mesh::of(enough, degrees, model.cut)) > 1)
    };
    let hint = |along: fn(Mesh) -> u32, otherwise: &str| match could(along) {
        true => format!("start {enough} ranks or a multiple of that: --nproc {enough}"),
        false => otherwise.to_owned(),
    };
    if tsp > 1 && meshes.iter().all(|(_, mesh)| mesh.tsp == 1) {
        let shards = listed(|model| model.cut.shards);
        return Err(Fault::usage("no phase has weights that ranks can hold for each other")
            .at("--tsp")
            .found(format!(
                "--tsp {tsp} with {}, weight_shards {shards}, context_chunks {chunks}",
                counted(world, "rank")
            ))
            .wanted("a number from 2 to --tsp that divides the ranks and a phase's weight_shards and context_chunks")
            .hint(hint(
                |mesh| mesh.tsp,
                "weight_shards = tsp and context_chunks = 2 x cp x tsp in a phase; they decide bits, cp and tsp do not",
            )));
    }
    if cp == 1 || meshes.iter().any(|(_, mesh)| mesh.cp > 1) {
        return Ok(());
    }
    Err(Fault::usage("no phase has micro-batches that ranks can share")
        .at("--cp")
        .found(format!(
            "--cp {cp} with {}{}, context_chunks {chunks}",
            counted(world, "rank"),
            if tsp > 1 { format!(" and --tsp {tsp}") } else { String::new() }
        ))
        .wanted("a number from 2 to --cp that divides the ranks and a phase's context_chunks")
        .hint(hint(
            |mesh| mesh.cp,
            "context_chunks = 2 x cp in a phase gives each rank as much to compute; it decides bits, cp does not",
        )))
}

/// Notes on phases that have fewer micro-batches than ranks, or cannot be shared as widely as requested.
pub fn idle_ranks(spec: &RunSpec, world: u32, degrees: Degrees) -> Vec<String> {
    let few = meshes(spec, world, degrees).into_iter().zip(spec.plan.phases());
    let few = few.flat_map(|((name, mesh), phase)| {
        let Ok(step) = spec.plan.step(phase.first_step) else { return Vec::new() };
        let (micro_batches, Mesh { dp, cp, tsp }) = (step.batch / step.micro_batch, mesh);
        let cut = spec.model_at(phase.first_step).map_or(Cut::WHOLE, |model| model.cut);
        let (Cut { chunks, shards }, together) = (cut, mesh.together());
        let mut notes = Vec::new();
        if micro_batches < u64::from(dp) {
            let idle = (u64::from(dp) - micro_batches) * u64::from(together);
            notes.push(format!(
                "note: phase {name:?} has {} in a step: {idle} of {world} ranks compute none of them",
                counted(micro_batches, "micro-batch")
            ));
        }
        if tsp < degrees.tsp {
            notes.push(format!(
                "note: phase {name:?} has {shards} shards of weights, {chunks} chunks in a micro-batch: of {world} \
                 ranks {tsp} hold weights for each other, not {}",
                degrees.tsp
            ));
        }
        if cp < degrees.cp {
            notes.push(format!(
                "note: phase {name:?} has {chunks} chunks in a micro-batch: of {world} ranks {cp} share each, not {}",
                degrees.cp
            ));
        }
        if together > 1 && !chunks.is_multiple_of(2 * u64::from(together)) {
            notes.push(format!(
                "note: phase {name:?} has {chunks} chunks in a micro-batch: {} for each of {together} ranks do not have \
                 equally many keys; a multiple of {} would",
                chunks / u64::from(together),
                2 * together
            ));
        }
        notes
    });
    few.collect()
}

/// Refuses ranks that train another run, with other kernels, or with other options than rank 0.
pub(crate) fn same(spec: &RunSpec, options: &[String], world: &World) -> Result<()> {
    let mut message = WordWriter::default();
    message.digest(Digest::of(spec)).text(&world.runtime.fingerprint());
    options.iter().for_each(|option| {
        message.text(option);
    });
    let gathered = world.comm.all_gather("the first meeting", message.bytes()).map_err(lost)?;
    let read = |bytes: &[u8]| {
        let mut words = WordReader::new(bytes);
        let (run, table) = (words.digest()?, words.text()?);
        let options = options.iter().map(|_| words.text()).collect::<Result<Vec<_>>>()?;
        words.end().map(|()| (run, table, options))
    };
    let first = read(&gathered[0])?;
    for (rank, gathered) in gathered.iter().enumerate() {
        let other = read(gathered)?;
        type Kind = fn(String) -> Fault;
        let differs = |(what, kind): (&str, Kind), (found, wanted): (&str, &str), hint: &str| {
            let what = format!("rank {rank} has another {what} than rank 0");
            Err(kind(what).found(found).wanted(wanted).hint(hint))
        };
        if other.0 != first.0 {
            // Every rank has found this, and sends its specification.
            let text = spec.canonical();
            let texts = world.comm.all_gather("the first meeting", text.as_bytes());
            let texts = texts.map_err(lost)?;
            let text = |rank: usize| String::from_utf8_lossy(&texts[rank]);
            let digests = [other.0, first.0].map(|digest| digest.to_string());
            let [key, found, wanted] = component(&text(0), &text(rank), digests);
            let hint = "start every rank with the same curriculum and stores";
            return differs(
                (key.as_str(), Fault::mismatch),
                (found.as_str(), wanted.as_str()),
                hint,
            );
        }
        if other.1 != first.1 {
            let hint = "ranks need one device architecture, one libtorch and one C library";
            return differs(("kernel table", Fault::mismatch), parted(&other.1, &first.1), hint);
        }
        let parts = other.2.iter().zip(&first.2).find(|(other, first)| other != first);
        if let Some((other, first)) = parts {
            let hint = "give every rank the same options";
            return differs(("command line", Fault::usage), (other.as_str(), first.as_str()), hint);
        }
    }
    Ok(())
}

/// The first difference between the runs of two ranks: its name, its value, and that of rank 0. If the texts are equal,
/// the digests of the runs.
fn component(first: &str, other: &str, [found, wanted]: [String; 2]) -> [String; 3] {
    let parse = |text: &str| Curriculum::parse(text, "a rank's curriculum");
    if let (Ok(first), Ok(other)) = (parse(first), parse(other))
        && let Some(difference) = first.difference(&other).into_iter().next()
    {
        return [difference.key, difference.found, difference.wanted];
    }
    let mut lines = first.lines().zip(other.lines());
    match lines.find(|(first, other)| first != other) {
        Some((first, other)) => {
            let key = first.split(" = ").next().unwrap_or(first);
            [key, other, first].map(str::to_owned)
        }
        None => ["run".to_owned(), found, wanted],
    }
}

/// The options that must be the same on every rank, as flags.
fn options(exec: &ExecOptions) -> Vec<String> {
    let SnapshotOptions { states, every, spike } = exec.snapshots;
    let stop = exec.stop_after.map_or_else(|| "none".to_owned(), |step| step.to_string());
    let digests: Vec<_> = exec.tasks.iter().map(|task| task.digest.to_string()).collect();
    vec![
        format!("--checkpoint-every {}", exec.checkpoint_every),
        format!("--stop-after {stop}"),
        format!("--validate-every {}", exec.validation.every),
        format!("--validation-sequences {}", exec.validation.windows),
        format!("--eval {}", digests.join(" ")),
        format!("--snapshots {states}"),
        format!("--snapshot-every {every}"),
        format!("--snapshot-on-spike {spike:e}"),
        format!("--cp {}", exec.degrees.cp),
        format!("--tsp {}", exec.degrees.tsp),
        format!("--grad-reduce {}", exec.grad_reduce.name()),
        format!("--no-hierarchical {}", exec.flat),
        format!("--transport {:?}", exec.transport).to_lowercase(),
        format!("--restart {}", exec.restart),
        format!("--replicate {}", exec.replicate),
        format!(
            "--min-ranks {}",
            exec.min_ranks.map_or_else(|| "all".to_owned(), |n| n.to_string())
        ),
    ]
}

/// The first entry in which two kernel tables differ.
fn parted<'a>(one: &'a str, other: &'a str) -> (&'a str, &'a str) {
    let mut entries = one.split("; ").zip(other.split("; "));
    entries.find(|(one, other)| one != other).unwrap_or((one, other))
}
