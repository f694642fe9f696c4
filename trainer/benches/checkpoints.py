"""What checkpoints cost a run: the stall, and how much slower the steps are beside which one is written.

    python trainer/benches/checkpoints.py ZTRAIN CURRICULUM [--steps 60] [--rounds 3] [--every 1 10 50] [-- EXTRA...]

Trains the same steps with a checkpoint every 1, 10 and 50 of them, and with none but the last one, in turns, `--rounds` times, so
that what else the machine does falls on all alike. A step's time is that between two lines of the ledger's events: it holds the
stall and whatever writing takes from the step beside it. Printed are the mean step of each interval, what it is longer than a
step without checkpoints, processor time the same way, which another program's load hardly moves, and the stalls that the run tells.
"""
import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def lines(path):
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def train(args, folder, every):
    """Seconds of a step on average, from the third one to the last but one; processor time of the run; stalls, in seconds."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    words = [args.ztrain, "--curriculum", args.curriculum, "--out", str(run), "--quiet", "--validate-every", "0"]
    words += ["--stop-after", str(args.steps), "--checkpoint-every", str(every)] + args.extra
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ledger, times = run / "ledger.jsonl", {}
    # Line 0 is the head; the last step waits for its checkpoint, which every run writes.
    while process.poll() is None:
        times.setdefault(lines(ledger) - 1, time.monotonic())
        time.sleep(0.001)
    if process.returncode != 0:
        sys.exit(process.stderr.read().decode())
    first, last = 2, args.steps - 1
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    written = [event for event in events if event["event"] == "checkpoint" and event["step"] < args.steps]
    stalls = [event.get("stall_seconds", 0.0) for event in written]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (times[last] - times[first]) / (last - first), spent, stalls


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ztrain")
    parser.add_argument("curriculum")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 50])
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.extra = words[end + 1 :]
    folder = Path(tempfile.mkdtemp())
    never = 10 * args.steps
    found = {every: [] for every in [never] + args.every}
    for _ in range(args.rounds):
        for every in found:
            found[every].append(train(args, folder, every))
    shutil.rmtree(folder)
    plain = statistics.median(step for step, _, _ in found[never])
    spent = statistics.median(spent for _, spent, _ in found[never])
    print("| a checkpoint every | step, ms: median of rounds (each) | over none | processor time over none | stall, ms: median, longest |")
    print("|---|---|---|---|---|")
    for every, rounds in found.items():
        steps = [step for step, _, _ in rounds]
        middle, stalls = statistics.median(steps), [stall for _, _, all in rounds for stall in all]
        work = statistics.median(spent for _, spent, _ in rounds) / spent - 1
        each = ", ".join(f"{1e3 * step:.1f}" for step in steps)
        stall = f"{1e3 * statistics.median(stalls):.1f}, {1e3 * max(stalls):.1f}" if stalls else ""
        name = "never but at the end" if every == never else f"{every} steps"
        print(f"| {name} | {1e3 * middle:.1f} ({each}) | {100 * (middle / plain - 1):+.1f} % | {100 * work:+.1f} % | {stall} |")


main()
