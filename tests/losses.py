#!/usr/bin/env python3
"""Ranks lost at random: seconds until the others have finished a new step, and one ledger whatever happened.

    tests/losses.py ZTRAIN CURRICULUM [--kills 100] [--seed 1] [--ranks 2 8] [--every 10] [--supervise] [--places] [-- EXTRA...]

Starts runs of so many ranks with --min-ranks 1 and loses ranks of each, one or two at a time, rank 0 as any other, most by
SIGKILL, some by SIGSTOP, until one is left or the run ends. With --supervise lost ranks are started again and join, all are
killed, and the seconds from a kill until a step was made with all of them are told as well. EXTRA goes to ztrain, for example
--replicate. At the end the same loss without --min-ranks: everything is started again and goes on from its checkpoint.

--places kills ranks at each place of tests/kills.txt instead, with --replicate and without, three ranks and a checkpoint every third
step. Exit 0 where every ledger is that of one rank.
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


def children(process):
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def rank_of(process):
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


def rules(run):
    """Every rank that is lost is started again at once."""
    path = Path(f"{run}.toml")
    path.write_text('[[crash]]\ndo = "restart"\n')
    return path


class Launch:
    def __init__(self, args, run, ranks, extra):
        self.run = run
        self.supervised = args.supervise and ranks > 1 and "--min-ranks" in extra
        words = [args.ztrain] + (["supervise", "--rules", str(rules(run))] if self.supervised else [])
        words += ["--curriculum", args.curriculum, "--out", str(run), "--workers", "1", "--quiet"]
        words += ["--nproc", str(ranks)] if ranks > 1 else []
        words += ["--checkpoint-every", str(args.every), "--validate-every", "0"] + extra
        self.log = open(f"{run}.log", "ab")
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self.log)
        self.ranks = []
        while ranks > 1 and len(self.ranks) < ranks and self.alive():
            self.ranks = self.processes()
            time.sleep(0.005)

    def processes(self):
        """The ranks' processes, in the order of their start."""
        found = children(self.process.pid)
        return [one for launcher in found for one in children(launcher)] if self.supervised else found

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


def come_back(args, draw, run, ranks):
    """Kills ranks of one supervised run until it ends: rows, and seconds until a step was made with all ranks again."""
    rows, whole = [], []
    launch = Launch(args, run, ranks, ["--min-ranks", "1"] + args.extra)
    while launch.alive():
        seen = lines(run) + draw.randint(1, 6)
        if not launch.until(lambda: lines(run) >= seen):
            break
        time.sleep(draw.random() * args.pause)
        processes = {rank_of(one): one for one in launch.processes()}
        victims = draw.sample(range(ranks), 2 if ranks > 2 and draw.random() < 0.25 else 1)
        before, joins, at = len(events(run, "recovered")), len(events(run, "joined")), time.time()
        try:
            for rank in victims:
                os.kill(processes[rank], signal.SIGKILL)
        except (ProcessLookupError, KeyError):
            continue
        if launch.until(lambda: len(events(run, "recovered")) > before):
            event = events(run, "recovered")[before]
            rows.append((ranks, victims, "KILL", event["time"] - at, event["again"]))

        def all_back():
            back = [one for one in events(run, "joined")[joins:] if len(one["ranks"]) == ranks]
            since = [one for one in events(run, "recovered") if back and one["generation"] >= back[-1]["generation"]]
            return since and since[0]["time"]

        if launch.until(all_back):
            whole.append(all_back() - at)
    launch.until(lambda: False)
    return rows, whole, launch.process.returncode


def places(args, folder, wanted):
    """Kills three ranks' run at each place of the table, both ways; how many went wrong."""
    here = Path(__file__).parent
    library, wrong, tried, found = folder / "faulty.so", 0, 0, []
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(compiler + [str(here / "faulty.cpp")], check=True)
    table = [line for line in (here / "kills.txt").read_text().splitlines() if line and line[0] != "#"]
    args.every = 3
    for number, line in enumerate(table):
        _, name, *ends = [word.strip() for word in line.split(";")]
        ends = [ends[at : at + 3] for at in range(0, len(ends), 3)]
        for way in ([], ["--replicate"]):
            run = folder / f"place-{number}{''.join(way)}"
            os.environ["FAULTY"] = "\n".join(f"kill {ranks} {count} {text}" for ranks, count, text in ends)
            os.environ["LD_PRELOAD"] = str(library)
            launch = Launch(args, run, 3, ["--min-ranks", "1"] + way)
            del os.environ["LD_PRELOAD"], os.environ["FAULTY"]
            launch.until(lambda: False)
            same = launch.process.returncode == 0 and digest(run) == wanted
            lost = [rank for event in events(run, "loss") for rank in event["lost"]]
            recovered = events(run, "recovered")
            seconds = [event["seconds"] for event in recovered]
            sources = ", ".join(event["from"] for event in recovered) or "nothing to go on with"
            told = f"{max(seconds):.2f} s" if seconds else "-"
            print(f"{name}{' (replicated)' if way else ''}: lost {lost}, from {sources}, {told}" + ("" if same else "  WRONG"),
                  flush=True)
            wrong, tried, found = wrong + (not same), tried + 1, found + seconds
    print(f"{tried} runs at {len(table)} places, {wrong} wrong")
    summary("from noticing to the next new step", found)
    return wrong


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
    parser.add_argument("--supervise", action="store_true", help="lost ranks are started again and join")
    parser.add_argument("--places", action="store_true", help="at each place of tests/kills.txt")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.extra = words[end + 1 :]
    draw, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    alone = Launch(args, folder / "alone", 1, [])
    alone.until(lambda: False)
    wanted, lost, rows, wrong = digest(folder / "alone"), 0, [], 0
    print(f"one rank, undisturbed: ledger {wanted}")
    if args.places:
        wrong = places(args, folder, wanted)
        sys.exit(1 if wrong else 0)
    number, whole = 0, []
    while lost < args.kills:
        run, ranks = folder / f"run-{number}", draw.randint(*args.ranks)
        if args.supervise:
            found, back, code = come_back(args, draw, run, ranks)
            whole += back
        else:
            found, code = disturb(args, draw, run, ranks)
        same = code == 0 and digest(run) == wanted
        wrong += not same
        lost += sum(len(event["lost"]) for event in events(run, "loss"))
        print(f"{ranks} ranks, ledger {digest(run)}" + ("" if same else f"  WRONG, exit {code}, see {run}.log"), flush=True)
        for _, victims, how, seconds, again in found:
            print(f"    {how} {victims}: {seconds:.2f} s, {again} steps again")
        rows, number = rows + found, number + 1
        if number > args.kills:
            break
    print(f"{lost} ranks lost in {number} runs, {wrong} wrong")
    summary("killed", [row[3] for row in rows if row[2] == "KILL"])
    summary("killed, until a step with all ranks", whole)
    summary(f"held, --rank-timeout {TIMEOUT}", [row[3] for row in rows if row[2] == "STOP"])
    times = [restart(args, draw, folder / f"again-{number}", 3) for number in range(args.restarts)]
    summary("all started again", [seconds for seconds in times if seconds])
    if not wrong:
        shutil.rmtree(folder)
    sys.exit(1 if wrong else 0)


main()
