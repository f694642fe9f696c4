"""What more workers gain in a build, and what a merge of many parts takes.

    python ingest/benches/scaling.py --zdata target/release/zdata --tokenizer tokenizer.json --work DIR
        [--bytes 700] [--files 24] [--rounds 3] [--parts 10000] DOCS.jsonl...

DOCS are plain JSON Lines with a field `text`; their lines are written again and again until there are `--bytes` MB in
`--files` files. DIR should be in memory (/dev/shm). Needs Python alone.

1. Workers: one pinned worker; two builds of one pinned worker each, side by side; one build of two workers. The second is what
   the machine lets two workers gain, the third what a build makes of it. All in turns, medians; the time of a build of one
   line is taken off ("loading").
2. Threads: the processor time of each of the build's threads, by name.
3. Merge: a build of `--parts` files of one line, one part each, by `zdata task`; what is timed is `zdata task merge`, and
   next to it as many renames in a loop.
"""

import argparse
import collections
import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import time

TICK = os.sysconf("SC_CLK_TCK")


def corpus(folder, tokenizer, lines, files, size):
    """A corpus of `files` files of `size` bytes each."""
    (folder / "raw").mkdir(parents=True)
    lines = itertools.cycle(lines)
    for number in range(files):
        with open(folder / "raw" / f"{number:05}.jsonl", "wb") as file:
            while file.tell() < size:
                file.write(next(lines))
    text = f'tokenizer = "{tokenizer}"\n{{head}}\n[[source]]\nname = "text"\nfiles = ["raw/*.jsonl"]\ntext = "text"\n'
    return folder, text


def written(folder, text, head=""):
    (folder / "corpus.toml").write_text(text.format(head=head))
    return folder / "corpus.toml"


def threads(process):
    """The processor seconds of a process's threads so far, by thread."""
    found = {}
    for task in pathlib.Path(f"/proc/{process}/task").glob("*"):
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except (OSError, IndexError):
            continue
        user, system = rest.split()[11:13]
        found[task.name] = (name, (int(user) + int(system)) / TICK)
    return found


def timed(commands, watch=False):
    """Seconds until all of these commands have ended; of the last one the time of its threads."""
    begun = time.monotonic()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands]
    used = {}
    while watch and running[-1].poll() is None:
        used.update(threads(running[-1].pid))
        time.sleep(0.02)
    for process in running:
        error = process.communicate()[1]
        if process.returncode:
            raise SystemExit(error.decode())
    return time.monotonic() - begun, used


def build(asked, corpus, out, workers, core):
    shutil.rmtree(out, ignore_errors=True)
    words = [asked.zdata, "build", corpus, "--out", out, "--workers", workers, "--quiet"]
    return [str(word) for word in ["taskset", "-c", core, *words]]


def workers(asked, work, lines):
    size = asked.bytes * 1_000_000
    folder, text = corpus(work / "large", asked.tokenizer, lines, asked.files, size // asked.files)
    large = written(folder, text)
    small = written(*corpus(work / "small", asked.tokenizer, lines, 1, 1))
    out = [work / "store-0", work / "store-1"]
    rows = {
        "loading": lambda: [build(asked, small, out[0], 1, "0")],
        "one worker": lambda: [build(asked, large, out[0], 1, "0")],
        "side by side": lambda: [build(asked, large, out[at], 1, str(at)) for at in range(2)],
        "two workers": lambda: [build(asked, large, out[0], 2, "0,1")],
    }
    took, by_thread = collections.defaultdict(list), []
    for _ in range(asked.rounds):
        for name, commands in rows.items():
            seconds, used = timed(commands(), watch=name == "two workers")
            took[name].append(seconds)
            by_thread.append(used)
            print(f"{name:14} {seconds:8.2f} s", flush=True)
    loading = statistics.median(took["loading"])
    net = {name: statistics.median(times) - loading for name, times in took.items()}
    one, side, two = net["one worker"], net["side by side"], net["two workers"]
    print(f"\nwithout loading ({loading:.2f} s), {size / 1e6:.0f} MB: one worker {size / 1e6 / one:.1f} MB/s, two {size / 1e6 / two:.1f} MB/s")
    print(f"the machine gains {2 * one / side:.2f}, a build {one / two:.2f}: {one / two / (2 * one / side):.3f} of it")
    names = collections.Counter()
    for name, seconds in by_thread[-1].values():
        names[name] += seconds
    for name, seconds in names.most_common():
        print(f"  thread {name:16} {seconds:7.2f} s")
    for path in [folder, *out]:
        shutil.rmtree(path)


def merge(asked, work, lines):
    # Each task is a process: it loads a small tokenizer.
    folder, text = corpus(work / "many", "tokenizer.json", lines, asked.parts, 1)
    many = written(folder, text, head="part_bytes = 1")
    train = [asked.zdata, "tokenizer", "train", many, "--vocab", "300", "--out", folder / "tokenizer.json", "--quiet"]
    subprocess.run([str(word) for word in train], check=True)
    task = [str(asked.zdata), "task"]
    cache = ["--cache-dir", str(work / "cache")]
    plan, tasks = subprocess.check_output([*task, "plan", str(many), *cache], text=True).split()[:2]
    begun = time.monotonic()
    for index in range(int(tasks)):
        subprocess.run([*task, "run", *cache, "--plan", plan, "--index", str(index)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"\n{asked.parts} parts in {tasks} tasks: {time.monotonic() - begun:.1f} s")
    seconds, _ = timed([[*task, "merge", *cache, "--plan", plan, "--out", str(work / "merged")]])
    begun = time.monotonic()
    for path in sorted(folder.glob("raw/*")):
        path.rename(path.with_suffix(".renamed"))
    print(f"merge {seconds:.2f} s; as many renames {time.monotonic() - begun:.2f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zdata", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--bytes", type=int, default=700, help="MB")
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", type=int, default=10_000)
    parser.add_argument("docs", type=pathlib.Path, nargs="+")
    asked = parser.parse_args()
    asked.zdata, asked.tokenizer = asked.zdata.resolve(), asked.tokenizer.resolve()
    work = asked.work / "scaling"
    work.mkdir(parents=True)
    try:
        lines = [line for path in asked.docs for line in path.read_bytes().splitlines(keepends=True)]
        if asked.bytes:
            workers(asked, work, lines)
        if asked.parts:
            merge(asked, work, lines)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
