"""Preparation beside datatrove: verdicts of filters, recall, precision and speed of deduplication and decontamination.

    python peer_prepare.py --zdata target/release/zdata --tokenizer tokenizer.json --work DIR DOCS.jsonl...
        [--eval EVAL.jsonl --template '{question} {answer}'] [--limit N] [--only filters,near,decontaminate]

DOCS hold `text`; files may be plain, .gz or (with the `zstd` program) .zst. Needs datatrove, spacy and pyarrow. Both
programs see the same file of documents. Ground truth is exact: Jaccard similarity of sets of five lower-case words,
by brute force over an inverted index. Planted copies (a quarter of the documents again, with 0 to 20 % of the words replaced) make
near duplicates of every degree.
"""

import argparse
import collections
import glob
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time


def documents(paths, limit):
    for path in paths:
        if path.endswith(".zst"):
            lines = subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout.decode().split("\n")
        else:
            lines = (gzip.open if path.endswith(".gz") else open)(path, "rt")
        for line in lines:
            if line.strip() and limit > 0:
                limit -= 1
                yield json.loads(line)["text"]


def zdata(args, name, steps):
    """Builds with `steps`; returns the ids kept, the manifest, seconds, and the line of the scan."""
    import pyarrow.parquet as pq

    folder = os.path.join(args.work, name)
    shutil.rmtree(folder, ignore_errors=True)
    corpus = os.path.join(args.work, name + ".toml")
    with open(corpus, "w") as out:
        out.write(f'tokenizer = {json.dumps(os.path.abspath(args.tokenizer))}\nunit = 64\nvalidation = 0\n'
                  f'[[source]]\nname = "docs"\nfiles = ["docs.jsonl"]\nid = "id"\n{steps}')
    begun = time.time()
    command = [args.zdata, "build", corpus, "--out", folder, "--workers", str(args.workers)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    seconds = time.time() - begun
    kept = set()
    for path in glob.glob(folder + "/docs/*/documents-train-*.parquet"):
        kept.update(pq.read_table(path, columns=["id"])["id"].to_pylist())
    scan = [line for line in ran.stderr.splitlines() if line.startswith("dedup scan")]
    return kept, json.load(open(folder + "/manifest.json")), seconds, scan


def filters(args, docs):
    from datatrove.data import Document
    from datatrove.pipeline import filters as peer

    pairs = {"gopher-quality": peer.GopherQualityFilter, "gopher-repetition": peer.GopherRepetitionFilter,
             "c4": peer.C4QualityFilter, "fineweb": peer.FineWebQualityFilter}
    size = sum(len(text.encode()) for text in docs.values()) / 1e6
    for name, make in pairs.items():
        kept, _, seconds, _ = zdata(args, name, f'[[prepare]]\nstep = "{name}"\n')
        judge = make()
        begun = time.time()
        theirs = set()
        for key, text in docs.items():
            try:
                if judge.filter(Document(text=text, id=key)) is True:
                    theirs.add(key)
            except ZeroDivisionError:
                pass
        peer_seconds = time.time() - begun
        differ = len(kept ^ theirs)
        print(f"{name:<18} {len(docs)} documents, kept {len(kept)} (datatrove {len(theirs)}), "
              f"verdicts differ for {differ} ({differ / len(docs):.3%}); {size / seconds:.1f} MB/s with tokenizing and "
              f"writing, {args.workers} workers (datatrove, judging alone, one process: {size / peer_seconds:.2f} MB/s)")


def planted(docs, seed=1):
    """The documents, and a quarter of them again with some words replaced."""
    chance = random.Random(seed)
    found = dict(docs)
    for key in list(docs)[::4]:
        words = docs[key].split(" ")
        for _ in range(int(len(words) * chance.choice([0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.2]))):
            words[chance.randrange(len(words))] = f"word{chance.randrange(10**6)}"
        found[key + "-copy"] = " ".join(words)
    return found


def similarities(docs, least):
    """The similarity of each pair of documents (their numbers, the earlier one first) that is at least so similar; exact."""
    sets, postings = [], collections.defaultdict(list)
    for number, text in enumerate(docs.values()):
        words = re.findall(r"\w+", text.lower())
        runs = {hash(" ".join(words[i:i + 5])) for i in range(len(words) - 4)}
        sets.append(len(runs))
        for run in runs:
            postings[run].append(number)
    shared = collections.Counter()
    for numbers in postings.values():
        if len(numbers) <= 1000:
            for at, first in enumerate(numbers):
                for second in numbers[at + 1:]:
                    shared[first, second] += 1
    found = {}
    for (first, second), both in shared.items():
        similarity = both / (sets[first] + sets[second] - both)
        if similarity >= least:
            found[first, second] = similarity
    return found


def similar(docs, least):
    """For each document: the greatest similarity to an earlier one, and to any other; exact."""
    earlier, any_other = [0.0] * len(docs), [0.0] * len(docs)
    for (first, second), similarity in similarities(docs, least).items():
        earlier[second] = max(earlier[second], similarity)
        for number in (first, second):
            any_other[number] = max(any_other[number], similarity)
    return earlier, any_other


def datatrove_minhash(args, docs):
    from datatrove.data import Document
    from datatrove.pipeline.dedup import (MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster,
                                          MinhashDedupFilter, MinhashDedupSignature)

    folder = os.path.join(args.work, "datatrove")
    shutil.rmtree(folder, ignore_errors=True)
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    data = lambda: (Document(text=text, id=key) for key, text in docs.items())
    begun = time.time()
    MinhashDedupSignature(folder + "/sigs", config=config).run(data(), 0, 1)
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(folder + "/sigs", folder + "/buckets", config=config).run(None, bucket, config.num_buckets)
    MinhashDedupCluster(folder + "/buckets", folder + "/remove", config=config).run(None, 0, 1)
    kept = {document.id for document in MinhashDedupFilter(folder + "/remove").run(data(), 0, 1)}
    return kept, time.time() - begun


def near(args, docs):
    docs = planted(docs)
    write(args, docs)
    size = sum(len(text.encode()) for text in docs.values()) / 1e6
    earlier, any_other = similar(docs, 0.3)
    kept, _, seconds, scan = zdata(args, "near", '[[prepare]]\nstep = "near-duplicates"\n')
    theirs, peer_seconds = datatrove_minhash(args, docs)
    print(f"near duplicates: {len(docs)} documents, {size:.1f} MB; 5 words, 14 bands of 8 rows on both sides")
    for who, kept, seconds in (("zdata", kept, seconds), ("datatrove", theirs, peer_seconds)):
        line = []
        for least in (0.7, 0.8, 0.9, 0.95):
            wanted = [key for key, most in zip(docs, earlier) if most >= least]
            line.append(f"{sum(key not in kept for key in wanted) / max(1, len(wanted)):.4f} of {len(wanted)} at {least}")
        gone = [most for key, most in zip(docs, any_other) if key not in kept]
        exact = [f"{sum(most >= least for most in gone) / max(1, len(gone)):.4f} at {least}" for least in (0.5, 0.7, 0.8)]
        print(f"  {who:<10} removed {len(gone)}; recall {', '.join(line)}; precision {', '.join(exact)}; "
              f"{seconds:.1f} s, {size / seconds:.1f} MB/s")
    print("  zdata:", *scan)
    manifest = zdata(args, "near-again", '[[prepare]]\nstep = "near-duplicates"\n')[1]
    print("  same digest again:", manifest["digest"] == json.load(open(args.work + "/near/manifest.json"))["digest"])


def decontaminate(args, docs):
    import numpy as np
    from datatrove.data import Document
    from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.utils.text import ngrams, simplify_text

    write(args, docs)
    size = sum(len(text.encode()) for text in docs.values()) / 1e6
    with (gzip.open if args.eval.endswith(".gz") else open)(args.eval, "rt") as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    with open(os.path.join(args.work, "eval.jsonl"), "w") as out:
        out.writelines(json.dumps(item) + "\n" for item in items)
    steps = f'[[prepare]]\nstep = "decontaminate"\nfiles = ["eval.jsonl"]\ntemplate = {json.dumps(args.template)}\n'
    kept, _, seconds, scan = zdata(args, "clean", steps)
    hits = [json.loads(line) for line in open(args.work + "/clean/docs/contaminated.jsonl")]

    folder = os.path.join(args.work, "index")
    os.makedirs(folder, exist_ok=True)
    config = NGramsDecontConfig(n_grams=13)
    begun = time.time()
    judge = NGramsDecontFilter(folder, config=config)
    hashes = set()
    for item in items:
        text = re.sub(r"\{([^}]*)\}", lambda field: str(item[field[1]]), args.template)
        words = judge.tokenizer.word_tokenize(simplify_text(text, config.norm_config))
        hashes.update(judge.hash_func(" ".join(run)) for run in ngrams(words, 13))
    np.array(list(hashes), dtype=config.hash_config.np_descr).tofile(folder + "/eval.index.hashes")
    theirs = {key for key, text in docs.items() if judge.filter(Document(text=text, id=key)) is True}
    peer_seconds = time.time() - begun

    # Exact: the same words as strings.
    plain = lambda text: re.findall(r"\w+", text.lower())
    grams = set()
    for item in items:
        words = plain(re.sub(r"\{([^}]*)\}", lambda field: str(item[field[1]]), args.template))
        grams.update(tuple(words[i:i + 13]) for i in range(len(words) - 12))
    dirty = set()
    for key, text in docs.items():
        words = plain(text)
        if any(tuple(words[i:i + 13]) in grams for i in range(len(words) - 12)):
            dirty.add(key)
    print(f"decontamination: {len(docs)} documents, {size:.1f} MB, {len(items)} items, 13 words")
    for who, kept, seconds in (("zdata", kept, seconds), ("datatrove", theirs, peer_seconds)):
        gone = set(docs) - kept
        print(f"  {who:<10} removed {len(gone)}; recall {len(gone & dirty) / max(1, len(dirty)):.4f} of {len(dirty)}, "
              f"precision {len(gone & dirty) / max(1, len(gone)):.4f}; {seconds:.1f} s, {size / seconds:.1f} MB/s")
    print(f"  zdata reports {len(hits)} pairs of document and item;", *scan)


def write(args, docs):
    with open(os.path.join(args.work, "docs.jsonl"), "w") as out:
        out.writelines(json.dumps({"id": key, "text": text}) + "\n" for key, text in docs.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zdata", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--eval")
    parser.add_argument("--template", default="{question} {answer}")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--only", default="filters,near,decontaminate")
    parser.add_argument("docs", nargs="+")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    docs = {f"d{at}": text for at, text in enumerate(documents(args.docs, args.limit)) if text}
    write(args, docs)
    only = args.only.split(",")
    if "filters" in only:
        filters(args, docs)
    if "near" in only:
        near(args, docs)
    if "decontaminate" in only and args.eval:
        decontaminate(args, docs)


if __name__ == "__main__":
    main()
