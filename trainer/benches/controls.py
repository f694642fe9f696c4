"""What ZAYA1's choices are worth: held-out losses of models that differ in one of them, with as many parameters.

    python trainer/benches/controls.py BIN STORE [--out runs/controls] [--steps 1000] [--seeds 3]
                                       [--rows 2] [--seq-len 256] [--jobs N] [--only NAME...]

BIN is the folder of `ztrain`, STORE that of the demo (`sh tests/demo.sh` makes it). Every model is `zaya1-nano` but for one
choice; `moe_intermediate_size` is set so that all have as many parameters. Models of one seed read the same text in the same
order. Each model is a run of `ztrain` on one core of the CPU, `--jobs` of them at a time. Stopped anywhere, the same command
continues. Losses are the same on a busy machine.

At the end the time of a step is measured by `ztrain bench step`, one model after the other in several rounds, for which nothing
else should run.

Columns: the held-out loss after the last step, mean and spread (standard deviation over seeds); its difference from ZAYA1 with
the same seed, mean and spread; seconds a step (median over rounds); the held-out loss at the time at which the fastest model has
finished, by the last validation before it.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess

# Each model by the keys of `[model]` in which it differs from ZAYA1.
MODELS = {
    "ZAYA1: CCA, MLP router, scaled residual": {},
    "grouped-query attention": {"layers": ["gqa"]},
    "linear attention": {"layers": ["linear"]},
    "linear router": {"router": "linear"},
    "plain residual": {"residual": "plain"},
}
ZAYA1 = next(iter(MODELS))
EVERY = 100
ROUNDS = 5
WIDTH = 256  # of an expert of `zaya1-nano`


def curriculum(asked, keys, width, seed):
    """The text of a model's curriculum: everything but the model is the same."""
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return f"""store = {json.dumps(str(asked.store.resolve()))}
seed = {seed}
dtype = "f32"

[model]
preset = "zaya1-nano"
moe_intermediate_size = {width}
{fields}

[optimizer]
kind = "adamw"
lr = 1e-3

[schedule]
warmup_steps = {asked.steps // 20}
decay_steps = {asked.steps - asked.steps // 20}
final_lr = 1e-4

[[phase]]
name = "controls"
steps = {asked.steps}
seq_len = {asked.seq_len}
batch = {asked.rows}
micro_batch = {asked.rows}
mix = {{ code = 7, prose = 2, manifests = 1 }}
"""


def parameters(asked, keys, width):
    """What `ztrain plan` counts for a model whose experts have this width."""
    path = asked.out / "plan.toml"
    path.write_text(curriculum(asked, keys, width, 0))
    said = subprocess.run([asked.bin / "ztrain", "plan", path, "--json"], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(said)["parameters"]


def width_for(asked, keys, wanted):
    """The width of experts, a multiple of 4, at which a model has nearly `wanted` parameters: they grow linearly with it."""
    here, there = parameters(asked, keys, WIDTH), parameters(asked, keys, WIDTH + 4)
    return WIDTH + 4 * round((wanted - here) / (there - here))


def events(folder, name):
    """The events of a name by step; of a step that was made again, the last."""
    lines = (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else []
    found = [event for event in map(json.loads, lines) if event["event"] == name]
    return {event["step"]: event for event in found}


def held_out(folder):
    """Held-out losses by step: the mean over all labels of all sources."""
    return {step: event["all"]["loss"] for step, event in events(folder, "validation").items()}


def spread(values):
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


def train(asked, name, width, seed):
    """Trains a model to its end, from where it is."""
    index = list(MODELS).index(name)
    text, out = asked.out / f"{index}-{seed}.toml", asked.out / f"{index}-{seed}"
    text.write_text(curriculum(asked, MODELS[name], width, seed))
    words = ["--curriculum", text, "--out", out, "--device", "cpu", "--workers", "1", "--quiet", "--validate-every", str(EVERY),
             "--validation-sequences", "32", "--checkpoint-every", str(EVERY), "--keep", "1", "--snapshots", "0"]
    subprocess.run([asked.bin / "ztrain", *words], check=True, stdout=subprocess.DEVNULL)


def seconds_a_step(asked, models):
    """By model, the median over rounds in which all are measured one after the other."""
    found = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name in models:
            text = asked.out / f"{list(MODELS).index(name)}-0.toml"
            words = ["bench", "step", "--curriculum", text, "--device", "cpu", "--workers", "1", "--steps", "10", "--json"]
            said = subprocess.run([asked.bin / "ztrain", *words], check=True, stdout=subprocess.PIPE).stdout
            found[name].append(asked.rows * asked.seq_len / json.loads(said)["tokens_per_second"])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def table(asked, models):
    """One row a model."""
    step, seconds = asked.steps, seconds_a_step(asked, models)
    folders = {name: [asked.out / f"{index}-{seed}" for seed in range(asked.seeds)] for index, name in enumerate(MODELS)}
    curves = {name: [held_out(folder) for folder in folders[name]] for name in models}
    end = step * min(seconds.values())
    print(f"\nAfter {step} steps of {asked.rows} x {asked.seq_len} tokens, seeds 0 to {asked.seeds - 1}:\n")
    print("| model | parameters | held-out loss | less ZAYA1's | s a step | loss at equal time |\n|---|---|---|---|---|---|")
    for name in models:
        last = [curve[step] for curve in curves[name]]
        less = [mine - curve[step] for mine, curve in zip(last, curves.get(ZAYA1, curves[name]))]
        until = max(at for at in curves[name][0] if at * seconds[name] <= end or at == EVERY)
        then = spread([curve[until] for curve in curves[name]])
        print(f"| {name} | {models[name]:,} | {spread(last)} | {spread(less)} | {seconds[name]:.3f} | {then} (step {until}) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/controls"))
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    for name, default in [("steps", 1000), ("seeds", 3), ("rows", 2), ("seq-len", 256), ("jobs", os.cpu_count())]:
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    if asked.steps % EVERY:
        parser.error(f"--steps is a multiple of {EVERY}")
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = parameters(asked, {}, WIDTH)
    widths = {name: width_for(asked, MODELS[name], wanted) for name in asked.only}
    counts = {name: parameters(asked, MODELS[name], widths[name]) for name in asked.only}
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        runs = [pool.submit(train, asked, name, widths[name], seed) for seed in range(asked.seeds) for name in asked.only]
        for run in runs:
            run.result()
    table(asked, counts)


if __name__ == "__main__":
    main()
