"""Checks and measures a GPU: tests/device.sh. Needs Python alone; torch and transformers only for the row beside ours.

    python3 tests/device.py FOLDER OUT [--device cuda] [--steps 20] [--seconds 600] [--only CHECK ...]

FOLDER has zdata, ztrain and, for the kernels alone, the test program `kernels` (`tests/device.sh --pack`). Each check ends as one of
`ok`, `WRONG` and `skipped`, the last with its reason. Exit 1 where something is wrong, 6 where there is no such device.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "trainer/benches"))
import side_by_side  # noqa: E402

SMALL = """store = "{store}"
seed = 11
dtype = "{dtype}"
[model]
preset = "zaya1-nano"
vocab_size = {vocab}
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
moe_intermediate_size = 32
num_experts = 4
router_hidden_size = 16
[optimizer]
kind = "muon"
lr = 1e-2
weight_decay = 0.1
clip = 1.0
[schedule]
warmup_steps = 3
[[phase]]
name = "all"
steps = {steps}
seq_len = 64
batch = 8
micro_batch = 2
mix = {{ words = 1 }}
[source.words]
max_epochs = 100
"""

# Shape of a benched step by preset: tokens of a sequence, sequences of a step and of a micro-batch.
STEPS = {"nano": (1024, 16, 8), "20m": (1024, 16, 8), "1b": (2048, 8, 4)}

BENCH = """store = "{store}"
seed = 3
dtype = "{dtype}"
[model]
preset = "zaya1-{preset}"
{fields}
[optimizer]
kind = "adamw"
lr = 1e-3
clip = 1.0
[schedule]
warmup_steps = 2
[[phase]]
name = "all"
steps = {steps}
seq_len = {seq_len}
batch = {batch}
micro_batch = {micro_batch}
mix = {{ words = 1 }}
[source.words]
max_epochs = 1000
"""


class Skip(Exception):
    """A check that cannot be made here, with the reason."""


class Wrong(Exception):
    """What does not hold."""


class Check:
    """All checks of one device; each method returns a line for people and numbers for machines."""

    def __init__(self, asked):
        self.asked, self.folder = asked, asked.folder.resolve()
        self.work = asked.out / "work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.begun, self.row, self.pretended, self.store = time.monotonic(), {}, False, None

    def run(self, *words, env=None, timeout=None, **more):
        """A program of the folder, to its end; its output."""
        words = [str(word) for word in words]
        left = self.asked.seconds + 60 - (time.monotonic() - self.begun)
        try:
            ran = subprocess.run([str(self.folder / words[0]), *words[1:]], capture_output=True, text=True,
                                 env=os.environ | (env or {}), timeout=min(timeout or left, max(left, 5)), **more)
        except subprocess.TimeoutExpired as late:
            raise Wrong(f"{' '.join(words[:3])}: not done after {late.timeout:.0f} s") from None
        if ran.returncode != 0:
            told = (ran.stderr or ran.stdout).strip().splitlines()[-6:]
            raise Wrong(f"{' '.join(words[:3])}: exit {ran.returncode}: " + " / ".join(told))
        return ran.stdout

    def late(self, share=1.0):
        if time.monotonic() - self.begun > share * self.asked.seconds:
            raise Skip(f"its time is over: {self.asked.seconds} s for all checks (--seconds)")

    def text(self):
        """A store of words without meaning."""
        if self.store is None:
            folder = self.work / "text"
            folder.mkdir()
            side_by_side.corpus(folder, 4096 if self.pretended else 400_000)
            self.run("zdata", "build", folder / "corpus.toml", "--out", folder / "store")
            self.store = folder / "store"
        return self.store

    def curriculum(self, name, text, **values):
        path = self.work / f"{name}.toml"
        path.write_text(text.format(store=self.text(), **values))
        return path

    def small(self, dtype="f32"):
        return self.curriculum(f"small-{dtype}", SMALL, dtype=dtype, vocab=side_by_side.VOCAB, steps=self.asked.steps)

    def train(self, name, *more, curriculum=None, device=None):
        """A run of the small model; its folder."""
        run = self.work / name
        self.run("ztrain", "--curriculum", curriculum or self.small(), "--out", run, "--device", device or self.asked.device,
                 "--validate-every", "0", "--quiet", *more)
        return run

    # The checks, in the order in which they are made.

    def devices(self):
        rows = [json.loads(line) for line in self.run("ztrain", "devices", "--json").splitlines()]
        name = self.asked.device if ":" in self.asked.device else self.asked.device + ":0"
        found = [row for row in rows if row["device"] == name]
        if not found:
            raise Wrong(f"no {name} on this machine; `ztrain devices` says what is missing")
        self.row = found[0]
        # The stand-in has no architecture, so that nothing that ran on it passes for what ran on a GPU.
        self.pretended = not self.row["architecture"]
        libraries = "; ".join(f"{key} {value}" for key, value in self.row["libraries"].items())
        architecture = self.row["architecture"] or "a stand-in without an architecture"
        return f"{self.row['name']}, {architecture}; {libraries}", self.row

    def program(self):
        program = self.folder / "kernels"
        if not program.exists():
            raise Skip(f"no test program `kernels` in {self.folder}: tests/device.sh --pack makes it")
        kept = self.folder / "emulated"
        env = {"ZTRAIN_EMULATED": str(kept)} if kept.is_dir() else {}
        return [str(program), "--exact", "--nocapture", "device::emulated::on_gpu::a_gpu_leaves_the_bits_of_the_emulator"], env

    def kernels(self):
        words, env = self.program()
        said = self.run(*words, env=env)
        line = [line for line in said.splitlines() if "leave the emulator's bits on Cuda(" in line]
        if not line:
            raise Wrong("the test program saw no device")
        return line[0].removeprefix("test ").split("... ")[-1], {"said": line[0]}

    def sanitizer(self):
        if self.pretended:
            raise Skip("a pretended GPU: the emulator's own tests run under thread and address sanitizers")
        tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if tool is None:
            raise Skip("no compute-sanitizer on this machine")
        words, env = self.program()
        found = {}
        for kind in ["memcheck", "racecheck"]:
            self.late(0.5)
            said = self.run(tool, "--tool", kind, "--error-exitcode", "9", *words, env=env, timeout=150)
            found[kind] = [line for line in said.splitlines() if "SUMMARY" in line]
        return "; ".join(f"{kind}: {' '.join(lines).replace('=', '').strip()}" for kind, lines in found.items()), found

    def bits(self):
        """The same ledger however it is computed, killed or not; and a step replayed."""
        ways = {"one micro-batch in flight": ["--workers", "1"], "two": ["--workers", "2"],
                "prefetch 1": ["--workers", "1", "--prefetch", "1"],
                "prefetch 7, 3 readers": ["--workers", "2", "--prefetch", "7", "--loader-threads", "3"],
                "recompute": ["--workers", "2", "--recompute"]}
        digests = {}
        for number, (way, words) in enumerate(ways.items()):
            run = self.train(f"way-{number}", *words)
            digests[way] = hashlib.sha256((run / "ledger.jsonl").read_bytes()).hexdigest()[:16]
        digests["killed and gone on"] = self.killed()
        last = self.asked.steps
        said = self.run("ztrain", "replay", "--run", self.work / "way-0", "--step", max(1, last - 1), "--device", self.asked.device)
        if "same bits" not in said:
            raise Wrong(f"replay: {said.splitlines()[0]}")
        if len(set(digests.values())) != 1:
            raise Wrong(f"ledgers of {last} steps differ: {digests}")
        return (f"{len(digests)} ledgers of {last} steps are one ({', '.join(digests)}); a replayed step has the same bits",
                {"steps": last, "ledgers": digests, "replay": said.splitlines()[0]})

    def killed(self):
        run = self.work / "killed"
        words = [str(self.folder / "ztrain"), "--curriculum", str(self.small()), "--out", str(run), "--device", self.asked.device,
                 "--validate-every", "0", "--checkpoint-every", "2", "--quiet"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = lambda: (run / "ledger.jsonl").read_bytes().count(b"\n") if (run / "ledger.jsonl").exists() else 0
        # The head, and about half of the steps.
        while process.poll() is None and lines() < 1 + max(1, self.asked.steps // 2):
            time.sleep(0.002)
        if process.poll() is not None:
            raise Wrong("it ended before it could be killed")
        process.send_signal(signal.SIGKILL)
        process.wait()
        return hashlib.sha256((self.train("killed") / "ledger.jsonl").read_bytes()).hexdigest()[:16]

    def tolerance(self):
        """CPU against GPU: no promise, a report. The first step has nothing behind it but one pass."""
        found = {}
        for dtype in ["f32", "bf16"]:
            sides = []
            for device in ["cpu", self.asked.device]:
                run = self.train(f"{dtype}-{device.replace(':', '-')}", curriculum=self.small(dtype), device=device)
                steps = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]
                sides.append([step["loss"] for step in steps])
            apart = [abs(a - b) / abs(a) for a, b in zip(*sides, strict=True)]
            found[dtype] = {"first": apart[0], "worst": max(apart), "steps": len(apart)}
            if not apart[0] < {"f32": 1e-4, "bf16": 2e-2}[dtype]:
                raise Wrong(f"the loss of the first step in {dtype} is {apart[0]:.1e} off that of a CPU")
        told = [f"{dtype} {one['first']:.1e} at step 1, at most {one['worst']:.1e} in {one['steps']}" for dtype, one in found.items()]
        return "loss of a CPU against it, relative: " + "; ".join(told), found

    def bandwidth(self):
        sizes = ["--from", "64K", "--to", "256K", "--seconds", "0.01"] if self.pretended else \
            ["--from", "16M", "--to", "1G", "--seconds", "0.1"]
        rows = self.run("ztrain", "bench", "memory", "--device", self.asked.device, "--json", *sizes)
        best = {}
        for row in map(json.loads, rows.splitlines()):
            best[row["operation"]] = max(best.get(row["operation"], 0), row["bytes_per_s"] / 1e9)
        return "GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in best.items()) + self.means_nothing(), best

    def gemm(self):
        sizes = ["--rows", "64", "--widths", "64,128", "--tokens", "64", "--seconds", "0.01"] if self.pretended else ["--seconds", "0.05"]
        rows = self.run("ztrain", "bench", "gemm", "--device", self.asked.device, "--json", *sizes)
        rows = [row for row in map(json.loads, rows.splitlines()) if "ours" in row]
        best, beside = {}, {}
        for row in rows:
            best[row["dtype"]] = max(best.get(row["dtype"], 0), row["ours"] / 1e12)
            beside.setdefault(row["dtype"], []).append(row["ours"] / row["libtorch"])
        told = [f"{dtype} {best[dtype]:.2f} TFLOP/s at best, {statistics.median(ratios):.2f} of libtorch's own call in the median"
                for dtype, ratios in beside.items()]
        return "; ".join(told) + self.means_nothing(), {"best_tflops": best, "rows": rows}

    def step(self, preset, dtype):
        seq_len, batch, micro_batch = STEPS[preset]
        fields = f"vocab_size = {side_by_side.VOCAB}" if preset != "1b" else ""
        steps = 6
        if self.pretended:
            if preset != "nano":
                raise Skip("a pretended GPU computes on this machine's processor: hours")
            seq_len, batch, micro_batch, steps = 64, 4, 2, 2
            fields += "\nnum_hidden_layers = 2\nhidden_size = 64"
        self.late(0.8)
        path = self.curriculum(f"{preset}-{dtype}", BENCH, dtype=dtype, preset=preset, fields=fields, steps=steps + 1,
                               seq_len=seq_len, batch=batch, micro_batch=micro_batch)
        words = ["ztrain", "bench", "step", "--curriculum", path, "--steps", steps, "--device", self.asked.device,
                 "--workers", "1", "--json"]
        counted = self.work / f"{preset}-{dtype}.standin"
        found = json.loads(self.run(*words, env={"STANDIN_REPORT": str(counted)}).splitlines()[-1])
        table = found["table"]
        memory = max(one["on_device"] for one in table["memory"]) / 2**20
        numbers = {"tokens_per_second": found["tokens_per_second"], "seconds_a_step": table["seconds"] / table["steps"],
                   "flops": table["model_flops"] / table["seconds"], "limit": table["limit"],
                   "utilisation": found["utilisation"], "device_mib": memory, "parts": table["parts"],
                   "kernels": found["kernels"]}
        line = (f"{found['tokens_per_second']:.0f} tokens/s, {numbers['flops'] / 1e12:.3f} TFLOP/s, "
                f"{100 * found['utilisation']:.1f} % of this device's {dtype} products, {memory:.0f} MiB")
        top = self.top(words, counted)
        numbers["top"] = top
        return line + self.means_nothing() + "".join(f"\n            {share}" for share in top), numbers

    def top(self, words, counted):
        """The ten kernels of a step with most time; on a pretended GPU the ten operations asked for most often."""
        if self.pretended:
            names = {}
            for line in counted.read_text().splitlines():
                for name, count in json.loads(line)["by_name"].items():
                    names[name] = names.get(name, 0) + count
            all_of_them = sum(names.values())
            ten = sorted(names.items(), key=lambda one: -one[1])[:10]
            return [f"{100 * count / all_of_them:5.1f} % of operations  {name}" for name, count in ten]
        nsys = shutil.which("nsys")
        if nsys is None:
            return ["top ten kernels skipped: no nsys on this machine"]
        report = self.work / "profile"
        self.run(nsys, "profile", "-t", "cuda", "--force-overwrite", "true", "-o", report, self.folder / words[0], *words[1:])
        said = self.run(nsys, "stats", "--report", "cuda_gpu_kern_sum", "--format", "json", f"{report}.nsys-rep")
        rows = json.loads(said[said.index("["):])
        return [f"{row['Time (%)']:5.1f} % of time  {row['Name'][:90]}" for row in rows[:10]]

    def checkpoints(self):
        """Stall of a checkpoint, and what the two steps behind it take longer; and how long batches were waited for."""
        steps, every = (12, 3) if self.pretended else (60, 10)
        seq_len, batch, micro_batch = (64, 8, 2) if self.pretended else STEPS["nano"]
        fields = f"vocab_size = {side_by_side.VOCAB}" + ("\nnum_hidden_layers = 2\nhidden_size = 64" if self.pretended else "")
        self.late(0.9)
        path = self.curriculum("kept", BENCH, dtype="f32" if self.pretended else "bf16", preset="nano", fields=fields, steps=steps,
                               seq_len=seq_len, batch=batch, micro_batch=micro_batch)
        run = self.train("kept", "--checkpoint-every", every, curriculum=path)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        took = {event["step"]: event["seconds"] for event in events if event["event"] == "step" and event["step"] > 2}
        kept = [event for event in events if event["event"] == "checkpoint"]
        behind = {event["step"] + after for event in kept for after in (1, 2)}
        mean = lambda of: statistics.mean(of) if (of := list(of)) else float("nan")
        alone = mean(seconds for step, seconds in took.items() if step not in behind)
        slower = mean(seconds for step, seconds in took.items() if step in behind) / alone - 1
        stall = statistics.median(event["stall_seconds"] for event in kept)
        end = [event for event in events if event["event"] == "stop"][-1]
        share = end["stall"] / max(end["seconds"], 1e-9)
        numbers = {"stall_seconds": stall, "slowdown_of_two_steps": slower, "step_seconds": alone, "data_stall": share,
                   "data_stall_first": end["stall_first"], "steps": steps, "every": every}
        return (f"a checkpoint stalls {1e3 * stall:.1f} ms (a step takes {1e3 * alone:.1f}), the two steps behind it take "
                f"{100 * slower:+.1f} %; data stall {100 * share:.1f} % of {steps - 1} steps" + self.means_nothing(), numbers)

    def beside(self):
        if self.pretended:
            raise Skip("a pretended GPU: torch's own Python programs do not know it")
        known = "import torch, transformers; assert torch.cuda.is_available(), 'torch sees no GPU'; transformers.ZayaConfig"
        ready = subprocess.run([sys.executable, "-c", known], capture_output=True, text=True)
        if ready.returncode != 0:
            raise Skip(f"this Python cannot: {ready.stderr.strip().splitlines()[-1]}")
        self.late(0.9)
        words = [sys.executable, ROOT / "trainer/benches/side_by_side.py", self.folder, "--device", self.asked.device,
                 "--dtype", "bf16", "--model", "zaya1-20m", "--rounds", "1", "--steps", "12"]
        said = self.run(*words, timeout=150)
        return "\n            ".join(said.strip().splitlines()), {"said": said}

    def means_nothing(self):
        return " (of a processor that pretends: no speed)" if self.pretended else ""

    def all(self):
        yield "devices", self.devices
        for name in ["kernels", "sanitizer", "bits", "tolerance", "bandwidth", "gemm"]:
            yield name, getattr(self, name)
        for preset, dtype in [("nano", "f32"), ("nano", "bf16"), ("20m", "bf16"), ("1b", "bf16")]:
            yield f"step {preset} {dtype}", lambda preset=preset, dtype=dtype: self.step(preset, dtype)
        yield "checkpoints", self.checkpoints
        yield "beside", self.beside


def level(check, outcomes):
    """The row for the table of levels: what this shows of the kernel table at hand."""
    held = all(outcomes.get(name, {}).get("outcome") == "ok" for name in ["kernels", "bits"])
    levels = "D L0" if held and not check.pretended else "D"
    run, table, digest = check.work / "way-0", {}, "none"
    if (run / "ledger.jsonl").exists():
        table = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["kernel_table"]
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        fingerprint = next(event["kernels"] for event in events if "kernels" in event)
        digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    columns = [f"`{digest}`", check.row.get("name", "?"), check.row.get("architecture") or "none", table.get("libtorch", "?"),
               table.get("operations", "?"), levels]
    return "| " + " | ".join(columns) + " |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--only", nargs="+", default=None)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    check, outcomes, lines = Check(asked), {}, []
    for name, make in check.all():
        if asked.only and name != "devices" and not any(name.startswith(only) for only in asked.only):
            continue
        begin, numbers = time.monotonic(), {}
        try:
            told, numbers = make()
            outcome = "ok"
        except Skip as why:
            outcome, told = "skipped", str(why)
        except Wrong as why:
            outcome, told = "WRONG", str(why)
        except Exception as why:  # A check that breaks is told like one that fails: the others are still made.
            outcome, told = "WRONG", f"{type(why).__name__}: {why}"
        seconds = time.monotonic() - begin
        outcomes[name] = {"outcome": outcome, "told": told, "seconds": round(seconds, 1), **numbers}
        lines.append(f"{outcome:8} {name:14} {seconds:6.1f} s  {told}")
        print(lines[-1], flush=True)
        if name == "devices" and outcome != "ok":
            sys.exit(6)
    wrong = [name for name, one in outcomes.items() if one["outcome"] == "WRONG"]
    skipped = [name for name, one in outcomes.items() if one["outcome"] == "skipped"]
    row = level(check, outcomes)
    lines += [f"{len(outcomes) - len(wrong) - len(skipped)} ok, {len(skipped)} skipped, {len(wrong)} wrong, "
              f"{time.monotonic() - check.begun:.0f} s", f"table of levels: {row}"]
    print("\n".join(lines[-2:]))
    (asked.out / "device.txt").write_text("\n".join(lines) + "\n")
    answer = {"device": check.row, "pretended": check.pretended, "checks": outcomes, "level": row}
    (asked.out / "device.json").write_text(json.dumps(answer, indent=1) + "\n")
    shutil.rmtree(check.work)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
