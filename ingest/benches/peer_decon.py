"""Decontamination beside decon, a Rust tool of AllenAI.

    python peer_decon.py --zdata target/release/zdata --tokenizer tokenizer.json --work DIR
        --decon target/release/decon --eval EVAL.jsonl [--rounds 3] [--limit N] DOCS.jsonl...

DOCS hold `text`, the items of EVAL `question` and `answer`; files may be plain, .gz or (with the `zstd` program) .zst. Needs no
Python package. Every program reads the same files, is pinned to one core, and runs in turns with the other one; what is
told is processor time (the user's, all threads; the system's is mostly pages that a hypervisor hands out, now fast, now
slow), the median of the rounds. `zdata` makes a whole store: it also encodes,
writes tokens and provenance, and hashes what it reads; "the step alone" is its time less that of the same build without the step.
"""

import argparse
import collections
import glob
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys

from peer_prepare import documents


def run(command):
    """Runs on one core; the user's processor seconds, and those of the clock."""
    begun = os.times()
    ran = subprocess.run(["taskset", "-c", "0", *command], capture_output=True, text=True)
    ended = os.times()
    if ran.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ended.children_user - begun.children_user, ended.elapsed - begun.elapsed


def emptied(args, *names):
    """Paths in the working folder where nothing lies."""
    for name in names:
        shutil.rmtree(os.path.join(args.work, name), ignore_errors=True)
    return [os.path.join(args.work, name) for name in names]


def write(args, docs):
    """Four files of documents."""
    [folder] = emptied(args, "raw")
    os.makedirs(folder)
    items = list(docs.items())
    for part in range(4):
        with open(f"{folder}/part-{part}.jsonl", "w") as out:
            for number in range(len(items) * part // 4, len(items) * (part + 1) // 4):
                key, text = items[number]
                out.write(json.dumps({"id": key, "text": text}) + "\n")


def zdata(args, steps):
    """Builds; returns the ids removed and the times."""
    folder, _ = emptied(args, "store", "store.work")
    corpus = os.path.join(args.work, "corpus.toml")
    with open(corpus, "w") as out:
        out.write(f'tokenizer = {json.dumps(os.path.abspath(args.tokenizer))}\nvalidation = 0\n'
                  f'[[source]]\nname = "docs"\nfiles = ["raw/*.jsonl"]\nid = "id"\n{steps}')
    used, wall = run([args.zdata, "build", corpus, "--out", folder, "--workers", "1"])
    gone = set()
    listed = folder + "/docs/00000/dropped.jsonl.zst"
    if os.path.exists(listed):
        lines = subprocess.run(["zstd", "-dc", listed], capture_output=True, check=True).stdout.splitlines()
        rows = (json.loads(line) for line in lines)
        gone = {row["id"] for row in rows if "spans" not in row}
    return gone, used, wall


def medians(rounds):
    return tuple(statistics.median(times) for times in zip(*rounds))


def told(count, size, ours, bare, theirs, peer):
    """The times of both programs, and of zdata's step alone."""
    step = max(ours[0] - bare[0], 0.001)
    for who, (used, wall) in (("zdata", ours), (peer, theirs)):
        print(f"  {who}: {used:.2f} s of processor time, {wall:.2f} s of wall time; "
              f"{count / used:.0f} documents/s, {size / used:.1f} MB/s")
    print(f"  zdata is {theirs[0] / ours[0]:.2f} times as fast; its step alone takes {step:.2f} s, "
          f"{count / step:.0f} documents/s, {theirs[0] / step:.1f} times")


def size_of(docs):
    return sum(len(text.encode()) for text in docs.values()) / 1e6


def contaminated(docs, items, chance):
    """Items put into every twentieth document, verbatim or with some of their words replaced; the ids by degree."""
    found, planted = dict(docs), {}
    degrees = [0, 0.02, 0.05, 0.1]
    for number, key in enumerate(list(docs)[::20]):
        item, degree = items[chance.randrange(len(items))], degrees[number % len(degrees)]
        words = f"{item['question']} {item['answer']}".split(" ")
        for at in chance.sample(range(len(words)), round(len(words) * degree)):
            words[at] = f"word{chance.randrange(10**6)}"
        lines = docs[key].split("\n")
        lines.insert(chance.randrange(len(lines) + 1), " ".join(words))
        found[key] = "\n".join(lines)
        planted[key] = degree
    return found, planted


def decontaminate(args, docs):
    items = [json.loads(line) for line in lines_of(args.eval)]
    docs, planted = contaminated(docs, items, random.Random(3))
    write(args, docs)
    evals, report = emptied(args, "evals", "report")
    os.makedirs(evals)
    with open(evals + "/set.jsonl", "w") as out:
        for number, item in enumerate(items):
            row = {"eval_key": "set", "eval_instance_index": number, "split": "test", "question": item["question"],
                   "answer": item["answer"], "config": "main", "doc_id": number, "fingerprint": f"{number:016x}"}
            out.write(json.dumps(row) + "\n")
    step = '[[prepare]]\nstep = "decontaminate"\nfiles = ["evals/set.jsonl"]\ntemplate = "{question} {answer}"\n'
    ours, bare, theirs = [], [], []
    for _ in range(args.rounds):
        gone, *times = zdata(args, step)
        ours.append(times)
        bare.append(zdata(args, "")[1:])
        emptied(args, "report")
        raw = os.path.join(args.work, "raw")
        theirs.append(run([args.decon, "detect", "--training-dir", raw, "--evals-dir", evals, "--report-output-dir", report,
                           "--worker-threads", "1"]))
    size = size_of(docs)
    print(f"decontamination: {len(docs)} documents, {size:.1f} MB, {len(items)} items, one core each")
    told(len(docs), size, medians(ours), medians(bare), medians(theirs), "decon")
    theirs = reported(args, report)
    for who, removed in (("zdata", gone), ("decon", theirs)):
        recall = []
        for degree in sorted(set(planted.values())):
            wanted = [key for key in planted if planted[key] == degree]
            recall.append(f"{sum(key in removed for key in wanted) / len(wanted):.3f} of {len(wanted)} at {degree:.0%}")
        right = len(removed & set(planted)) / max(1, len(removed))
        print(f"  {who:<10} removed {len(removed)}; recall by words replaced {', '.join(recall)}; precision {right:.3f}")


def reported(args, report):
    """The documents that a report of decon names, by file and line from 0."""
    found = set()
    rows = collections.defaultdict(list)
    for path in glob.glob(args.work + "/raw/*.jsonl"):
        rows[os.path.basename(path)] = [json.loads(line)["id"] for line in open(path)]
    for path in glob.glob(report + "/**/*.jsonl", recursive=True):
        for line in open(path):
            row = json.loads(line)
            name = re.match(r"part-\d+", os.path.basename(row["training_file"]))[0] + ".jsonl"
            found.add(rows[name][row["training_line"]])
    return found


def lines_of(path):
    """Its lines that are not empty, decompressed by its name."""
    reader = ["zstd", "-dc"] if path.endswith(".zst") else ["gzip", "-dc"] if path.endswith(".gz") else ["cat"]
    text = subprocess.run([*reader, path], capture_output=True, check=True).stdout.decode()
    return [line for line in text.split("\n") if line.strip()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zdata", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--decon", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("docs", nargs="+")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    docs = {f"d{at}": text for at, text in enumerate(documents(args.docs, args.limit)) if text}
    decontaminate(args, docs)


if __name__ == "__main__":
    main()
