#!/usr/bin/env python3
"""Ranks lost at random: seconds until the others have finished a new step, and one ledger whatever happened.

    tests/losses.py ZTRAIN CURRICULUM [--kills 100] [--seed 1] [--ranks 2 8] [--every 10] [-- EXTRA...]

Starts runs of so many ranks with --min-ranks 1 and loses ranks of each, one or two at a time, rank 0 as any other, most by
SIGKILL, some by SIGSTOP, until one is left or the run ends. EXTRA goes to ztrain, for example --mirror. At the end the same loss
without --min-ranks: everything is started again and goes on from its checkpoint. Exit 0 where every ledger is that of one rank.
"""
import argparse, hashlib, json, os, random, shutil, signal, statistics, subprocess, sys, tempfile, time
from pathlib import Path

TIMEOUT = 3


def lines(run):
    try:
        return (run / "ledger.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def events(run, name):
    try:
        text = (run / "events.jsonl").read_text()
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]
    return [e for e in map(json.loads, whole.splitlines()) if e["event"] == name]


def digest(run):
    return hashlib.sha256((run / "ledger.jsonl").read_bytes()).hexdigest()[:16]


class Launch:
    def __init__(self, args, run, ranks, extra):
        self.run = run
        words = [args.ztrain, "--curriculum", args.curriculum, "--out", str(run), "--workers", "1", "--quiet"]
        words += ["--nproc", str(ranks)] if ranks > 1 else []
        words += ["--checkpoint-every", str(args.every), "--validate-every", "0"] + extra
        self.log = open(f"{run}.log", "ab")
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self.log)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.ranks = []
        while ranks > 1 and len(self.ranks) < ranks and self.alive():
            self.ranks = [int(word) for word in children.read_text().split()]
            time.sleep(0.005)

    def alive(self):
        return self.process.poll() is None

    def until(self, condition, patience=300):
        start = time.time()
        while self.alive() and not condition():
            if time.time() - start > patience:
                self.process.kill()
                sys.exit(f"{self.run}: hangs")
            time.sleep(0.002)
        return self.alive()


def disturb(args, draw, run, ranks):
    """Loses ranks of one run until one is left or it ends; a row for each loss."""
    rows = []
    launch = Launch(args, run, ranks, ["--min-ranks", "1", "--rank-timeout", str(TIMEOUT)] + args.extra)
    left = list(range(ranks))
    while len(left) > 1:
        seen = lines(run) + draw.randint(1, 6)
        if not launch.until(lambda: lines(run) >= seen):
            break
        time.sleep(draw.random() * args.pause)
        count = 2 if len(left) > 2 and draw.random() < 0.25 else 1
        victims, how = draw.sample(left, count), "STOP" if draw.random() < 0.1 else "KILL"
        before, at = len(events(run, "recovered")), time.time()
        try:
            for rank in victims:
                os.kill(launch.ranks[rank], getattr(signal, f"SIG{how}"))
        except ProcessLookupError:
            break
        left = [rank for rank in left if rank not in victims]
        if launch.until(lambda: len(events(run, "recovered")) > before):
            event = events(run, "recovered")[before]
            rows.append((ranks, victims, how, event["time"] - at, event["again"]))
    launch.until(lambda: False)
    return rows, launch.process.returncode


def restart(args, draw, run, ranks):
    """The same loss where all ranks end: seconds until the run, started again by hand, has a new line."""
    launch = Launch(args, run, ranks, [])
    if not launch.until(lambda: lines(run) >= 3 + draw.randint(1, 2 * args.every)):
        return None
    time.sleep(draw.random() * args.pause)
    at = time.time()
    os.kill(launch.ranks[draw.randrange(ranks)], signal.SIGKILL)
    launch.until(lambda: False)
    seen = lines(run)
    launch = Launch(args, run, ranks - 1, [])
    launch.until(lambda: lines(run) > seen)
    seconds = time.time() - at
    launch.until(lambda: False)
    return seconds


def summary(name, seconds):
    if seconds:
        middle, most = statistics.median(seconds), max(seconds)
        print(f"{name}: {len(seconds)} times, median {middle:.2f} s, longest {most:.2f} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ztrain")
    parser.add_argument("curriculum")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 8))
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds over which the moment of a loss is spread")
    parser.add_argument("--restarts", type=int, default=5)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.extra = words[end + 1 :]
    draw, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    alone = Launch(args, folder / "alone", 1, [])
    alone.until(lambda: False)
    wanted, lost, rows, wrong = digest(folder / "alone"), 0, [], 0
    print(f"one rank, undisturbed: ledger {wanted}")
    number = 0
    while lost < args.kills:
        run, ranks = folder / f"run-{number}", draw.randint(*args.ranks)
        found, code = disturb(args, draw, run, ranks)
        same = code == 0 and digest(run) == wanted
        wrong += not same
        lost += sum(len(event["lost"]) for event in events(run, "loss"))
        print(f"{ranks} ranks, ledger {digest(run)}" + ("" if same else f"  WRONG, exit {code}, see {run}.log"))
        for _, victims, how, seconds, again in found:
            print(f"    {how} {victims}: {seconds:.2f} s, {again} steps again")
        rows, number = rows + found, number + 1
        if number > args.kills:
            break
    print(f"{lost} ranks lost in {number} runs, {wrong} wrong")
    summary("killed", [row[3] for row in rows if row[2] == "KILL"])
    summary(f"held, --rank-timeout {TIMEOUT}", [row[3] for row in rows if row[2] == "STOP"])
    times = [restart(args, draw, folder / f"again-{number}", 3) for number in range(args.restarts)]
    summary("all started again", [seconds for seconds in times if seconds])
    if not wrong:
        shutil.rmtree(folder)
    sys.exit(1 if wrong else 0)


main()
