"""What tests/device.py checks and measures on a GPU. Needs Python alone; torch and transformers only for the row beside ours."""

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
# The wide one is what a device of 80 GB is filled by.
STEPS = {"nano": (1024, 16, 8), "20m": (1024, 16, 8), "1b": (2048, 8, 4), "1b-wide": (2048, 128, 16)}

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


# Runs of the same steps that have to leave the same ledger. In bf16 products of experts go through a library.
WAYS = {
    "f32": {"one micro-batch in flight": ["--workers", "1"], "two": ["--workers", "2"],
            "prefetch 1": ["--workers", "1", "--prefetch", "1"],
            "prefetch 7, 3 readers": ["--workers", "2", "--prefetch", "7", "--loader-threads", "3"],
            "recompute": ["--workers", "2", "--recompute"]},
    "bf16": {"one micro-batch in flight": ["--workers", "1"], "two": ["--workers", "2"],
             "recompute": ["--workers", "1", "--recompute"]},
}
# What products of experts, as training computes them, should reach of the fastest way that there is.
EXPERTS = 0.9
# How far libtorch's allocator may be from the formula of memory, as a part of it.
MEMORY = 0.10


class Checks:
    """All checks of one device; each method returns a line for people and numbers for machines."""

    def __init__(self, asked, folder, work):
        self.asked, self.folder, self.work = asked, folder, work
        self.begun, self.row, self.pretended, self.store = time.monotonic(), {}, False, None
        self.measured = {}

    def left(self):
        return self.asked.seconds - (time.monotonic() - self.begun)

    def late(self, share=1.0):
        if self.left() < (1.0 - share) * self.asked.seconds:
            raise Skip(f"its time is over: {self.asked.seconds} s for all checks (--seconds, --only)")

    def run(self, *words, env=None, timeout=None, accept=(0,)):
        """A program of the folder, to its end; its output."""
        words = [str(word) for word in words]
        # A little more than there is: whoever limits this allows for what it takes to end.
        left = max(self.left() + 20, 5)
        try:
            ran = subprocess.run([str(self.folder / words[0]), *words[1:]], capture_output=True, text=True,
                                 env=os.environ | self.operations() | (env or {}), timeout=min(timeout or left, left))
        except subprocess.TimeoutExpired as late:
            said = f"{' '.join(words[:3])}: not done after {late.timeout:.0f} s"
            raise (Wrong if timeout and timeout < left else Skip)(said) from None
        if ran.returncode not in accept:
            self.failed(words, ran.returncode, f"{ran.stdout}\n{ran.stderr}")
            told = (ran.stderr or ran.stdout).strip().splitlines()[-6:]
            raise Wrong(f"{' '.join(words[:3])}: exit {ran.returncode}: " + " / ".join(told))
        return ran.stdout

    def failed(self, words, code, said):
        """Keeps all that a program said which should not have ended so."""
        with open(self.asked.out / "failures.txt", "a", encoding="utf-8") as kept:
            kept.write(f"{' '.join(words)}: exit {code}\n{said}\n")

    def operations(self):
        """Named, so that nothing falls back to libtorch's operators in silence."""
        return {"ZTRAIN_OPS": self.asked.ops} if self.row else {}

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
        path.write_text(text.format(**{"store": self.text()} | values))
        return path

    def small(self, dtype="f32", **more):
        return self.curriculum(f"small-{dtype}", SMALL, dtype=dtype, vocab=side_by_side.VOCAB, steps=self.asked.steps, **more)

    def train(self, run, *more, curriculum=None, device=None):
        """A run of the small model; its folder."""
        device, run = device or self.asked.device, self.work / run
        env = {"ZTRAIN_OPS": ""} if device == "cpu" else None
        self.run("ztrain", "--curriculum", curriculum or self.small(), "--out", run, "--device", device,
                 "--validate-every", "0", "--quiet", *more, env=env)
        by = head(run)["kernel_table"]["operations"]
        if device != "cpu" and not by.startswith(self.asked.ops):
            raise Wrong(f"{run.name} was computed by the operations {by!r} instead of {self.asked.ops!r}")
        return run

    def replay(self, run, step, *more):
        said = self.run("ztrain", "replay", "--run", run, "--step", step, "--device", self.asked.device, "--workers", "1",
                        "--keep-states", "0", *more, accept=(0, 4))
        first = said.splitlines()[0]
        if "same bits" not in first:
            raise Wrong(f"replay: {first}")
        return first

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

    def program(self, *tests):
        program = self.folder / "kernels"
        if not program.exists():
            raise Skip(f"no test program `kernels` in {self.folder}: tests/device.sh --pack makes it")
        kept = self.folder / "emulated"
        env = {"ZTRAIN_EMULATED": str(kept)} if kept.is_dir() else {}
        return [str(program), "--nocapture", "--test-threads", "1", *(f"device::emulated::on_gpu::{test}" for test in tests)], env

    def kernels(self):
        words, env = self.program("")
        said = self.run(*words, env=env)
        lines = [line for line in said.splitlines() if "leave the emulator's bits on Cuda(" in line]
        if len(lines) < 2:
            raise Wrong("the test program saw no device")
        lines = sorted(line.removeprefix("test ").split("... ")[-1] for line in lines)
        return "; ".join(lines), {"said": lines}

    def sanitizer(self):
        if self.pretended:
            raise Skip("a pretended GPU: the emulator's own tests run under thread and address sanitizers")
        tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if tool is None:
            raise Skip("no compute-sanitizer on this machine")
        words, env = self.program("a_gpu_leaves_the_bits_of_the_emulator")
        found = {}
        for kind in ["memcheck", "racecheck"]:
            self.late(0.7)
            said = self.run(tool, "--tool", kind, "--error-exitcode", "9", *words, env=env, timeout=150)
            if "leave the emulator's bits on Cuda(" not in said:
                raise Wrong(f"{kind}: the test program saw no device")
            found[kind] = [line for line in said.splitlines() if "SUMMARY" in line]
        return "; ".join(f"{kind}: {' '.join(lines).replace('=', '').strip()}" for kind, lines in found.items()), found

    def bits(self, dtype):
        """The same ledger however it is computed, killed or not; and a step replayed."""
        digests, last = {}, self.asked.steps
        # Each way stands in tests/device.rs for a pretended GPU.
        ways = list(WAYS[dtype].items())[:: len(WAYS[dtype]) - 1 if self.pretended else 1]
        for number, (way, words) in enumerate(ways):
            self.late()
            digests[way] = ledger(self.train(f"way-{dtype}-{number}", *words, curriculum=self.small(dtype)))
        self.late()
        digests["killed and gone on"] = ledger(self.killed(f"killed-{dtype}", dtype))
        if len(set(digests.values())) != 1:
            raise Wrong(f"ledgers of {last} steps differ: {digests}")
        run = self.work / f"way-{dtype}-0"
        said = self.replay(run, max(1, last - 1))
        return (f"{len(digests)} ledgers of {last} steps are one ({', '.join(digests)}); a replayed step has the same bits",
                {"steps": last, "ledgers": digests, "replay": said, "table": head(run)["kernel_table"],
                 "fingerprint": fingerprint(run)})

    def killed(self, name, dtype, first=(), then=(), device=None):
        """A run that is killed, and goes on in another way; its folder."""
        run, device = self.work / name, device or self.asked.device
        words = [str(self.folder / "ztrain"), "--curriculum", str(self.small(dtype)), "--out", str(run), "--device", device,
                 "--validate-every", "0", "--checkpoint-every", "2", "--workers", "1", "--quiet", *first]
        told = self.work / f"{name}.stderr"
        with open(told, "wb") as stderr:
            process = subprocess.Popen(words, env=os.environ | self.operations(), stdout=subprocess.DEVNULL, stderr=stderr)
        lines = lambda: (run / "ledger.jsonl").read_bytes().count(b"\n") if (run / "ledger.jsonl").exists() else 0
        deadline = time.monotonic() + max(min(self.left(), self.asked.patience), 5)
        try:
            # The head, and about half of the steps.
            while process.poll() is None and lines() < 1 + max(1, self.asked.steps // 2):
                if time.monotonic() > deadline:
                    raise Wrong(f"{lines()} lines of a ledger when it was to be killed in its midst, and no time is left")
                time.sleep(0.002)
            if process.poll() is not None:
                self.failed(words, process.returncode, told.read_text(errors="replace"))
                raise Wrong(f"it ended before it could be killed: exit {process.returncode} (failures.txt)")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        return self.train(run.name, "--workers", "1", *then, curriculum=self.small(dtype), device=device)

    def ranks(self):
        """Several ranks on this one GPU, killed and gone on as more, and a replay by one; ranks that share micro-batches."""
        device = self.asked.device if ":" in self.asked.device else self.asked.device + ":0"
        of = lambda count, *more: ["--workers", "1", "--nproc", str(count), "--transport", "gloo", *more]
        ledgers = {}

        def same(way, run, alone):
            self.late()
            ledgers[way] = ledger(run)
            if ledgers[way] != ledger(alone):
                raise Wrong(f"{way}: another ledger than that of one rank")

        for dtype in WAYS:
            alone = self.work / f"way-{dtype}-0"
            if not alone.exists():
                self.train(alone.name, "--workers", "1", curriculum=self.small(dtype))
        run = self.killed("killed-ranks", "f32", of(2)[2:], of(3)[2:], device)
        same("2 ranks killed, 3 go on", run, self.work / "way-f32-0")
        # By one rank, of a step that three have computed.
        said = self.replay(run, max(1, self.asked.steps - 1))
        same("2 ranks in bf16", self.train("two", *of(2), curriculum=self.small("bf16"), device=device), self.work / "way-bf16-0")
        cut = SMALL.replace("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 2\nweight_shards = 2")
        cut = self.curriculum("cut", cut, dtype="f32", vocab=side_by_side.VOCAB, steps=self.asked.steps)
        alone = self.train("cut", "--workers", "1", curriculum=cut)
        for what in ["--cp", "--tsp"]:
            same(f"{what} 2", self.train(f"cut{what}", *of(2, what, "2"), curriculum=cut, device=device), alone)
        return (f"{len(ledgers)} ledgers of {self.asked.steps} steps are those of one rank ({', '.join(ledgers)}); "
                "one replays a step of three with the same bits",
                {"ledgers": ledgers, "replay": said, "table": head(run)["kernel_table"], "fingerprint": fingerprint(run)})

    def tolerance(self):
        """CPU against GPU: no promise, a report. The first step has nothing behind it but one pass."""
        found = {}
        for dtype in ["f32", "bf16"]:
            sides = []
            for device in ["cpu", self.asked.device]:
                self.late()
                words = [] if device == "cpu" else ["--workers", "1"]
                run = self.train(f"{dtype}-{device.replace(':', '-')}", *words, curriculum=self.small(dtype), device=device)
                steps = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]
                sides.append([step["loss"] for step in steps])
            apart = [abs(a - b) / abs(a) for a, b in zip(*sides, strict=True)]
            found[dtype] = {"first": apart[0], "worst": max(apart), "steps": len(apart)}
            if not apart[0] < {"f32": 1e-4, "bf16": 2e-2}[dtype]:
                raise Wrong(f"the loss of the first step in {dtype} is {apart[0]:.1e} off that of a CPU")
        told = [f"{dtype} {one['first']:.1e} at step 1, at most {one['worst']:.1e} in {one['steps']}" for dtype, one in found.items()]
        return "loss of a CPU against it, relative: " + "; ".join(told), found

    def bandwidth(self):
        self.late(0.9)
        sizes = ["--from", "64K", "--to", "256K", "--seconds", "0.01"] if self.pretended else \
            ["--from", "16M", "--to", "1G", "--seconds", "0.1"]
        rows = self.run("ztrain", "bench", "memory", "--device", self.asked.device, "--json", *sizes)
        best = {}
        for row in map(json.loads, rows.splitlines()):
            best[row["operation"]] = max(best.get(row["operation"], 0), row["bytes_per_s"] / 1e9)
        return "GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in best.items()) + self.means_nothing(), best

    def gemm(self):
        self.late(0.9)
        small = ["--rows", "64", "--widths", "64", "--tokens", "64", "--dtype", "f32", "--seconds", "0.01"]
        sizes = small if self.pretended else ["--seconds", "0.05"]
        model = self.shape(*(("nano", "f32") if self.pretended else ("1b", "bf16")), 6)
        said = self.run("ztrain", "bench", "gemm", "--device", self.asked.device, "--json", "--curriculum", model, *sizes)
        said = [json.loads(line) for line in said.splitlines()]
        rows, experts = [[row for row in said if key in row] for key in ("ours", "experts")]
        best, beside, reached = {}, {}, {}
        for row in rows:
            best[row["dtype"]] = max(best.get(row["dtype"], 0), row["ours"] / 1e12)
            beside.setdefault(row["dtype"], []).append(row["ours"] / row["libtorch"])
        told = [f"{dtype} {best[dtype]:.2f} TFLOP/s at best, {statistics.median(ratios):.2f} of libtorch's own call in the median"
                for dtype, ratios in beside.items()]
        for row in experts:
            ways = {way: row[way] for way in ("own", "library", "loop", "padded") if row[way]}
            name = f"{row['dtype']} {row['way']}"
            reached[name] = min(reached.get(name, (9e9, "")), (row["of_best"], max(ways, key=ways.get)))
        told += [f"experts {name} {of:.2f} of the fastest way, {which}" for name, (of, which) in reached.items()]
        told[-1] += f" (goal {EXPERTS})"
        attention = [row for row in said if "attention" in row]
        longest = max(attention, key=lambda row: (row["attention"], row["dtype"] == "bf16"))
        ways = {way: longest[way] for way in ("own", "library") if way in longest}
        rates = lambda row: f"{row['forward'] / 1e12:.2f} and {row['backward'] / 1e12:.2f} TFLOP/s"
        told += [f"attention over {longest['attention']} tokens, {longest['dtype']}, there and back: {rates(longest)}"
                 + "".join(f", {way} {rates(of)}" for way, of in ways.items())]
        return ("; ".join(told) + self.means_nothing(),
                {"best_tflops": best, "rows": rows, "experts": experts, "reached": reached, "attention": attention})

    def shape(self, preset, dtype, steps):
        """A curriculum of a step to be measured."""
        seq_len, batch, micro_batch = STEPS[preset]
        fields = f"vocab_size = {side_by_side.VOCAB}" if not preset.startswith("1b") else ""
        if self.pretended:
            if preset != "nano":
                raise Skip("a pretended GPU computes on this machine's processor: hours")
            seq_len, batch, micro_batch = 64, 4, 2
            fields += "\nnum_hidden_layers = 2\nhidden_size = 64"
        # One warms up, and one is traced.
        return self.curriculum(f"{preset}-{dtype}", BENCH, dtype=dtype, preset=preset.removesuffix("-wide"), fields=fields,
                               steps=steps + 2, seq_len=seq_len, batch=batch, micro_batch=micro_batch)

    def hash(self):
        """Each product of a model many times."""
        times, rows = ("3" if self.pretended else "50"), []
        for preset, dtype in [("nano", "f32")] if self.pretended else [("nano", "f32"), ("20m", "bf16"), ("1b", "bf16")]:
            self.late(0.9)
            said = self.run("ztrain", "bench", "gemm", "--curriculum", self.shape(preset, dtype, 6), "--hash", times, "--dtype", dtype,
                            "--device", self.asked.device, "--json", accept=(0, 4))
            rows += [{"preset": preset} | json.loads(line) for line in said.splitlines()]
        several = [row for row in rows if row["outcomes"] != 1]
        if several:
            one = several[0]
            raise Wrong(f"{len(several)} of {len(rows)} products have several outcomes: {one['outcomes']} of {one['times']} are "
                        f"different for {one['name']}, {one['way']}, {one['dtype']}, by {one['by']}")
        by = sorted({row["by"] for row in rows})
        return f"{len(rows)} products of models, each {times} times, have one outcome each (by {', '.join(by)})", {"rows": rows}

    def step(self, preset, dtype):
        self.late(0.85)
        steps = 2 if self.pretended else 6
        words = ["ztrain", "bench", "step", "--curriculum", self.shape(preset, dtype, steps), "--steps", steps,
                 "--device", self.asked.device, "--workers", "1", "--json"]
        traced = ["--trace", self.work / f"{preset}-{dtype}.trace"]
        found = json.loads(self.run(*words, *traced).splitlines()[-1])
        table = found["table"]
        memory = max(one["on_device"] for one in table["memory"]) / 2**20
        formula = max(sum(one["formula"].values()) for one in table["memory"]) / 2**20
        numbers = {"tokens_per_second": found["tokens_per_second"], "seconds_a_step": table["seconds"] / table["steps"],
                   "flops": table["model_flops"] / table["seconds"], "limit": table["limit"],
                   "utilisation": found["utilisation"], "device_mib": memory, "formula_mib": formula, "parts": table["parts"],
                   "kernels": found["kernels"]}
        self.measured[f"{preset} {dtype}"] = numbers | {"trace": table["trace"], "words": words}
        return (f"{found['tokens_per_second']:.0f} tokens/s, {numbers['flops'] / 1e12:.3f} TFLOP/s, "
                f"{100 * found['utilisation']:.1f} % of this device's {dtype} products, {memory:.0f} MiB" + self.means_nothing(), numbers)

    def top(self, which):
        """The ten kernels of a step with most time, and what of it only checks bits."""
        if which not in self.measured:
            raise Skip("that step was not measured")
        trace, words = self.measured[which]["trace"], self.measured[which]["words"]
        if not trace["on_device"] and not self.pretended:
            return self.profiled(words)
        part = lambda seconds: f"{100 * seconds / max(trace['busy'], 1e-12):5.1f} %"
        share = lambda one: f"\n            {part(one['seconds'])}  {one['calls']:6} times  {one['name'][:90]}"
        whose = "kernels and copies" if trace["on_device"] else "libtorch's operations on the host"
        return (f"{1e3 * trace['busy']:.2f} ms of {whose} in a traced step of {1e3 * trace['seconds']:.2f} ms, "
                f"{part(trace['exactness']).strip()} of it only check bits" + self.means_nothing()
                + "".join(map(share, trace["parts"])) + "\n            of most time:" + "".join(map(share, trace["top"])), trace)

    def profiled(self, words):
        """The same by nsys, where libtorch's profiler sees no device."""
        nsys = shutil.which("nsys")
        if nsys is None:
            raise Skip("libtorch's profiler saw nothing on the device, and there is no nsys on this machine")
        self.late(0.9)
        report = self.work / "profile"
        self.run(nsys, "profile", "-t", "cuda", "--force-overwrite", "true", "-o", report, self.folder / words[0], *words[1:])
        said = self.run(nsys, "stats", "--report", "cuda_gpu_kern_sum", "--format", "json", f"{report}.nsys-rep")
        rows = json.loads(said[said.index("["):])[:10]
        told = [f"\n            {row['Time (%)']:5.1f} %  {row['Name'][:90]}" for row in rows]
        return "of most time, by nsys:" + "".join(told), {"rows": rows}

    def memory(self):
        """What libtorch's allocator had on the device at most against the formula that plans go by."""
        if not self.measured:
            raise Skip("no step was measured")
        if not self.asked.ops.startswith("device"):
            raise Skip("the formula is that of our own kernels: libtorch's operators hold more")
        off = {which: one["device_mib"] / one["formula_mib"] - 1 for which, one in self.measured.items()}
        mib = lambda which: f"{self.measured[which]['device_mib']:.0f} MiB"
        told = "; ".join(f"{which} {mib(which)}, {100 * by:+.1f} % of the formula" for which, by in off.items())
        far = [which for which, by in off.items() if abs(by) > MEMORY]
        # The pretended one's models are so small that what the formula leaves out counts.
        if far and not self.pretended:
            raise Wrong(f"more than {100 * MEMORY:.0f} % off the formula: {told}")
        return told, off

    def checkpoints(self):
        """Stall of a checkpoint, and what the two steps behind it take longer; and how long batches were waited for."""
        steps, every = (9, 3) if self.pretended else (60, 10)
        seq_len, batch, micro_batch = (64, 2, 2) if self.pretended else STEPS["nano"]
        fields = f"vocab_size = {side_by_side.VOCAB}" + ("\nnum_hidden_layers = 2\nhidden_size = 64" if self.pretended else "")
        self.late(0.9)
        path = self.curriculum("kept", BENCH, dtype="f32" if self.pretended else "bf16", preset="nano", fields=fields, steps=steps,
                               seq_len=seq_len, batch=batch, micro_batch=micro_batch)
        run = self.train("kept", "--checkpoint-every", every, "--workers", "1", curriculum=path)
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
        said = {}
        for preset in ["nano", "20m", "1b"]:
            seq_len, batch, micro_batch = STEPS[preset]
            # Those that there is time for, the smallest first.
            if said and self.left() < 0.15 * self.asked.seconds:
                break
            words = [sys.executable, ROOT / "trainer/benches/side_by_side.py", self.folder, "--device", self.asked.device,
                     "--dtype", "bf16", "--model", f"zaya1-{preset}", "--rounds", "1", "--steps", "8", "--rows", batch,
                     "--seq-len", seq_len, "--micro-batch", micro_batch]
            try:
                said[preset] = self.run(*words)
            except Skip as late:
                if not said:
                    raise
                said[preset] = f"zaya1-{preset}: {late}"
        return "\n            ".join(line for one in said.values() for line in one.strip().splitlines()), said

    def means_nothing(self):
        return " (of a processor that pretends: no speed)" if self.pretended else ""

    # Two GPUs of one architecture: what one trained, the other computes again.

    def trained(self):
        into = self.asked.out.resolve() / "trained"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        folder = self.work / "words"
        folder.mkdir()
        side_by_side.corpus(folder, 64 * 8 * self.asked.steps)
        self.run("zdata", "build", folder / "corpus.toml", "--out", into / "store")
        for dtype in WAYS:
            self.train(into / dtype, "--workers", "1", curriculum=self.small(dtype, store=into / "store"))
        size = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
        ledgers = {dtype: ledger(into / dtype) for dtype in WAYS}
        return f"{self.asked.steps} steps in {' and '.join(WAYS)}, {size / 2**20:.1f} MiB in {into}", {"ledgers": ledgers}

    def replayed(self):
        found, here = {}, self.asked.replay
        for dtype in WAYS:
            run = here / dtype
            steps = sum(1 for _ in (run / "ledger.jsonl").open()) - 1
            for step in sorted({1, max(1, steps // 2), steps}):
                self.late()
                found[f"{dtype} step {step}"] = self.replay(run, step, "--store", here / "store")
        return f"{len(found)} steps that another device trained have the same bits here: {', '.join(found)}", found

    def all(self):
        yield "devices", self.devices
        if self.asked.train or self.asked.replay:
            yield from [("train", self.trained)] if self.asked.train else [("replay", self.replayed)]
            return
        yield "kernels", self.kernels
        for dtype in WAYS:
            yield f"bits {dtype}", lambda dtype=dtype: self.bits(dtype)
        for name in ["ranks", "hash", "bandwidth", "gemm"]:
            yield name, getattr(self, name)
        measured = [("nano", "f32"), *((preset, "bf16") for preset in STEPS)]
        for preset, dtype in measured:
            yield f"step {preset} {dtype}", lambda preset=preset, dtype=dtype: self.step(preset, dtype)
            yield f"top {preset} {dtype}", lambda which=f"{preset} {dtype}": self.top(which)
        for name in ["memory", "checkpoints", "tolerance", "beside", "sanitizer"]:
            yield name, getattr(self, name)


def head(run):
    return json.loads((run / "ledger.jsonl").read_text().splitlines()[0])


def ledger(run):
    return hashlib.sha256((run / "ledger.jsonl").read_bytes()).hexdigest()[:16]


def fingerprint(run):
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return next(event["kernels"] for event in events if "kernels" in event)
