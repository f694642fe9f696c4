"""Plans a grid of shapes with what this machine measures, and prints planned beside measured seconds: tests/sizing.sh."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ztrain, work, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

CURRICULUM = """store = "store"
seed = 3
dtype = "{dtype}"

[model]
preset = "zaya1-nano"
hidden_size = {hidden}
num_hidden_layers = {layers}
moe_intermediate_size = {hidden}

[optimizer]
kind = "{optimizer}"
lr = 1e-3
weight_decay = 0.1
clip = 1.0

[schedule]
warmup_steps = 2
decay_steps = 20
final_lr = 1e-4

[[phase]]
name = "only"
steps = 24
seq_len = {seq_len}
batch = {batch}
micro_batch = {micro_batch}
mix = {{ {mix} }}
"""

# Width, layers, tokens of a sequence, sequences of a step and of a micro-batch, format, optimizer.
GRID = [
    (128, 2, 256, 8, 2, "f32", "adamw"),
    (128, 2, 256, 8, 4, "f32", "muon"),
    (256, 2, 256, 8, 2, "f32", "muon"),
    (256, 4, 512, 4, 1, "f32", "adamw"),
    (256, 2, 512, 4, 2, "bf16", "adamw"),
    (384, 2, 512, 4, 2, "f32", "adamw"),
]

# What a plan and a table of a step call the same; the rest is below a per cent.
GROUPS = {
    "attention": ["attention, forward", "attention, backward"],
    "experts": ["experts, forward", "experts, backward"],
    "router": ["router, forward", "router, backward"],
    "head": ["head and loss, both ways"],
    "norms, residuals": ["embedding, norms, residuals"],
    "exactness": ["checksums of micro-batches", "checksums and norm of the sum"],
    "tree": ["tree of additions"],
    "optimizer": ["Muon", "AdamW"],
    "exchange": ["blocks packed and sent", "waiting for blocks of other ranks", "waiting for the slowest rank",
                 "new weights to every rank"],
}


def run(*command):
    """What a command prints."""
    return subprocess.run([ztrain, *command], check=True, capture_output=True, text=True).stdout


def seconds_of(parts):
    """Seconds by group."""
    spent = dict(parts)
    return {group: sum(spent.get(name, 0.0) for name in names) for group, names in GROUPS.items()}


def row(shape, ranks):
    """Planned and measured seconds of a step, by group."""
    hidden, layers, seq_len, batch, micro_batch, dtype, optimizer = shape
    path = work / "grid.toml"
    sources = [one["name"] for one in json.loads((work / "store/manifest.json").read_text())["sources"]]
    mix = ", ".join(f'"{name}" = 1' for name in sources)
    path.write_text(CURRICULUM.format(hidden=hidden, layers=layers, seq_len=seq_len, batch=batch, micro_batch=micro_batch,
                                      dtype=dtype, optimizer=optimizer, mix=mix))
    cluster = str(work / f"cluster-{ranks}.toml")
    planned = json.loads(run("plan", str(path), "--cluster", cluster, "--json"))["sizing"]["phases"][0]["time"]
    command = ["bench", "step", "--curriculum", str(path), "--workers", "1", "--warm-up", "8", "--steps", "15", "--json"]
    found = json.loads(run(*command, *(["--nproc", str(ranks)] if ranks > 1 else [])))
    table = found["table"]
    # The benches that a plan reads give medians, too; of a group by itself, since ranks wait now here, now there.
    names = [name for name, _ in table["parts"]]
    groups = [seconds_of(zip(names, step["parts"])) for step in table["by_step"]]
    measured = {group: statistics.median(step[group] for step in groups) for group in GROUPS}
    whole = (planned["seconds"], statistics.median(step["seconds"] for step in table["by_step"]))
    return seconds_of(planned["parts"]), measured, whole


def main():
    for ranks in (1, 2):
        cluster = str(work / f"cluster-{ranks}.toml")
        # With two ranks two processes compute at once: rates are those of a worker beside another.
        workers = ["--workers", str(ranks), "--seconds", seconds, "--out", cluster]
        run("bench", "gemm", "--rows", "16,64,128,256,512", "--widths", "64,128,256,384,512", *workers)
        run("bench", "memory", "--from", "1K", "--to", "64M", *workers)
        if ranks > 1:
            run("bench", "collectives", "--nproc", str(ranks), "--to", "16M", "--seconds", seconds, "--out", cluster)
        text = Path(cluster).read_text()
        Path(cluster).write_text(text.replace(f"workers = {ranks}", "workers = 1"))
    errors, groups = [], {group: [] for group in GROUPS}
    print("| width x layers, tokens, micro-batch | | ranks | " + " | ".join(GROUPS) + " | step | error |")
    print("|---" * (len(GROUPS) + 5) + "|")
    for shape in GRID:
        for ranks in (1, 2):
            planned, measured, (plan, step) = row(shape, ranks)
            for group in GROUPS:
                if measured[group] > 0.01 * step:
                    groups[group].append(abs(planned[group] / measured[group] - 1))
            errors.append(abs(plan / step - 1))
            cells = [f"{1e3 * planned[group]:.0f} / {1e3 * measured[group]:.0f}" for group in GROUPS]
            hidden, layers, seq_len, batch, micro_batch, dtype, optimizer = shape
            print(f"| {hidden} x {layers}, {batch} x {seq_len}, {micro_batch} | {dtype} {optimizer} | {ranks} | "
                  + " | ".join(cells) + f" | {1e3 * plan:.0f} / {1e3 * step:.0f} | {100 * (plan / step - 1):+.0f} % |",
                  flush=True)
    print("\nplanned / measured, milliseconds of a step on rank 0; "
          f"median error of a step {100 * statistics.median(errors):.0f} %")
    for group, found in groups.items():
        if found:
            print(f"  {group}: median error {100 * statistics.median(found):.0f} % of {len(found)}")


main()
