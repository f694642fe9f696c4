"""Quality filters and deduplication beside datamap-rs and duplodocus, Rust tools of AllenAI.

    python peer_datamap.py --zdata target/release/zdata --tokenizer tokenizer.json --work DIR
        [--datamap target/release/datamap-rs] [--duplodocus target/release/duplodocus]
        [--rounds 3] [--limit N] [--only quality,repetition,exact,near] DOCS.jsonl...

DOCS hold `text`; files may be plain, .gz or (with the `zstd` program) .zst. Needs no Python package. Every program reads the
same files, is pinned to one core, and runs in turns with the others; what is told is processor time (the user's, all
threads), the median of the rounds. `zdata` makes a whole store: it also encodes, writes tokens and provenance, and hashes
what it reads; "its step alone" is its time less that of a build without the step of only those documents that stay, so that
it includes reading those that go. The others write the documents that stay.

Truth: for filters, drawn documents that either break one rule plainly or none; for exact duplicates, equal texts; for near ones,
Jaccard similarity of sets of five lower-case words, by brute force (`peer_prepare.py`).
"""

import argparse
import collections
import glob
import json
import os
import random
import subprocess

from peer_decon import emptied, lines_of, medians, run, size_of, told, write, zdata
from peer_prepare import documents, planted, similarities

QUALITY = [
    ("page_len_filter", {"length_type": "word", "lower_bound": 50, "upper_bound": 100000, "ignore_punctuation": True}),
    ("word_len_filter", {"lower_bound": 3, "upper_bound": 10}),
    ("symbol_ratio_filter", {"max_symbol_to_word_ratio": 0.1}),
    ("bullet_filter", {"max_bullet_ratio": 0.9}),
    ("ellipsis_line_ratio_filter", {"max_ratio": 0.3}),
    ("alphabetic_word_ratio_filter", {"max_ratio": 0.2}),
    ("stop_word_filter", {"count_unique": True, "min_stop_word": 2}),
]
REPETITION = [("massive_web_repetition_filter", {})]


def ids_under(folder):
    """The ids of all documents in a folder."""
    paths = [path for path in glob.glob(folder + "/**/*", recursive=True) if os.path.isfile(path)]
    return {json.loads(line)["id"] for path in paths for line in lines_of(path)}


def map_documents(args, steps, keep):
    """datamap-rs over the raw files; documents that stay are written to `keep`."""
    config = os.path.join(args.work, "map.json")
    with open(config, "w") as out:
        json.dump({"text_field": "text", "pipeline": [{"name": name, "kwargs": kwargs} for name, kwargs in steps]}, out)
    raw = os.path.join(args.work, "raw")
    return run([args.datamap, "--threads", "1", "map", "--input-dir", raw, "--output-dir", keep, "--config", config])


def by_filters(args, steps):
    """The ids that datamap-rs keeps by filters, and its times."""
    [folder] = emptied(args, "mapped")
    times = map_documents(args, steps, folder)
    return ids_under(folder + "/step_final"), times


def by_groups(args):
    """The ids that datamap-rs keeps of exact duplicates: it notes hashes, groups by them, keeps one of each group."""
    mapped, grouped, kept = emptied(args, "mapped", "grouped", "kept")
    config = os.path.join(args.work, "group.yaml")
    with open(config, "w") as out:
        out.write('name: exact\ngroup_keys: ["hash"]\nsort_keys: [["id"]]\nnum_buckets: 16\nkeep_idx: 0\n')
    threads = [args.datamap, "--threads", "1"]
    times = [map_documents(args, [("hash_annotator", {"hash_source": "text", "hash_destination": "hash"})], mapped),
             run([*threads, "group", "--input-dir", mapped + "/step_final", "--group-dir", grouped, "--config", config]),
             run([*threads, "group-filter", "--input-dir", grouped, "--output-dir", kept, "--config", config])]
    return ids_under(kept), tuple(map(sum, zip(*times)))


def by_duplodocus(args, command, *more):
    """The ids that duplodocus keeps, and its times."""
    kept, _ = emptied(args, "kept", "storage")
    raw, storage = os.path.join(args.work, "raw"), os.path.join(args.work, "storage")
    given = ["--storage-dir", storage] if command == "minhash-memory" else []
    times = run([args.duplodocus, "--threads", "1", command, "--input-dir", raw, *given, "--output-dir", kept, *more])
    return ids_under(kept), times


def in_turns(args, docs, step, peers):
    """Runs zdata with and without the step and every peer, in turns; tells their times. The ids that each removed."""
    write(args, docs)
    staying = argparse.Namespace(**{**vars(args), "work": os.path.join(args.work, "staying")})
    ours, bare, theirs, removed = [], [], collections.defaultdict(list), {}
    for turn in range(args.rounds):
        removed["zdata"], *times = zdata(args, f'[[prepare]]\nstep = "{step}"\n')
        ours.append(times)
        if turn == 0:
            write(staying, {key: text for key, text in docs.items() if key not in removed["zdata"]})
        bare.append(zdata(staying, "")[1:])
        for who, peer in peers.items():
            kept, times = peer()
            removed[who] = set(docs) - kept
            theirs[who].append(times)
    size = size_of(docs)
    print(f"{step}: {len(docs)} documents, {size:.1f} MB, one core each")
    for who in peers:
        told(len(docs), size, medians(ours), medians(bare), medians(theirs[who]), who)
    return removed


def score(removed, wanted, judged):
    """Recall and precision of what was removed, among the documents judged."""
    for who, gone in removed.items():
        right = len(gone & wanted)
        print(f"  {who:<10} removed {len(gone)}; recall {right / max(1, len(wanted)):.4f} of {len(wanted)}, "
              f"precision {right / max(1, len(gone & judged)):.4f}")


def drawn(rules, count, seed=7):
    """Documents of drawn words: half of them break one rule plainly, the others none. All, and the broken ones."""
    chance = random.Random(seed)
    common = "the be to of and that have with".split()
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 8))) for _ in range(20000)]
    sentence = lambda: " ".join(chance.choices(common, k=3) + chance.choices(words, k=9)).capitalize() + "."
    good = lambda: "\n\n".join(" ".join(sentence() for _ in range(5)) for _ in range(8))
    docs, broken = {}, set()
    for number in range(count):
        text = good()
        if number % 2:
            text = rules[number // 2 % len(rules)](text, chance)
            broken.add(f"drawn{number}")
        docs[f"drawn{number}"] = text
    return docs, broken


def bad_quality():
    """What breaks one rule of Gopher's quality filter each."""
    long = lambda text: " ".join(word + "abcdefghij" for word in text.split())
    return [
        lambda text, chance: " ".join(text.split()[:30]),
        lambda text, chance: " ".join(word[:2] for word in text.split()),
        lambda text, chance: long(text),
        lambda text, chance: " ".join(word + " #" for word in text.split()),
        lambda text, chance: "\n".join("- " + " ".join(text.split()[at:at + 6]) for at in range(0, 300, 6)),
        lambda text, chance: "\n".join(" ".join(text.split()[at:at + 12]) + "..." for at in range(0, 300, 12)),
        lambda text, chance: " ".join(word if at % 2 else str(1000 + at) for at, word in enumerate(text.split())),
        lambda text, chance: " ".join(word for word in text.split() if len(word) > 4),
    ]


def bad_repetition():
    """What breaks one rule of Gopher's repetition filter each."""
    def runs(text, chance):
        piece = " ".join(text.split()[:40])
        return "\n".join(f"{line} {piece}" for line in text.split("\n\n"))

    return [
        lambda text, chance: "\n".join([text.split("\n\n")[0]] * 5 + text.split("\n\n")),
        lambda text, chance: "\n\n".join(text.split("\n\n")[:2] * 4),
        lambda text, chance: " ".join(f"{word} again once" for word in text.split()),
        runs,
    ]


def filters(args, docs, step, theirs, rules):
    extra, broken = drawn(rules, 800)
    removed = in_turns(args, {**docs, **extra}, step, {"datamap-rs": lambda: by_filters(args, theirs)})
    score(removed, broken, set(extra))
    differ = len((removed["zdata"] ^ removed["datamap-rs"]) & set(docs))
    print(f"  verdicts differ for {differ} of the {len(docs)} documents that were not drawn")


def exact(args, docs):
    copies = {f"{key}-copy": docs[key] for key in list(docs)[::4]}
    docs = {**docs, **copies}
    first, again = {}, set()
    for key, text in docs.items():
        if first.setdefault(text, key) != key:
            again.add(key)
    peers = {}
    if args.datamap:
        peers["datamap-rs"] = lambda: by_groups(args)
    if args.duplodocus:
        peers["duplodocus"] = lambda: by_duplodocus(args, "exact-dedup-memory")
    removed = in_turns(args, docs, "exact-duplicates", peers)
    score(removed, again, set(docs))
    for who, gone in removed.items():
        kept = [first[text] for key, text in docs.items() if key not in gone]
        print(f"  {who:<10} keeps {len(kept)} documents of {len(set(kept))} texts")


def near(args, docs):
    docs = planted(docs)
    # Five words and the four spaces between them: duplodocus counts spaces as words.
    more = ["--num-buckets", "14", "--bucket-size", "8", "--tokenizer", "uniseg", "--ngram-size", "9"]
    peer = lambda: by_duplodocus(args, "minhash-memory", *more, "--remove-duplicates", "true")
    removed = in_turns(args, docs, "near-duplicates", {"duplodocus": peer})
    keys, pairs = list(docs), similarities(docs, 0.3)
    most = collections.defaultdict(float)
    for pair, similarity in pairs.items():
        for number in pair:
            most[keys[number]] = max(most[keys[number]], similarity)
    for who, gone in removed.items():
        line = []
        for least in (0.7, 0.8, 0.9):
            # Which of two documents stays is a program's own rule: one of them has to go.
            wanted = [pair for pair, similarity in pairs.items() if similarity >= least]
            found = sum(keys[first] in gone or keys[second] in gone for first, second in wanted)
            line.append(f"{found / max(1, len(wanted)):.3f} of {len(wanted)} pairs at {least}")
        exact = [f"{sum(most[key] >= least for key in gone) / max(1, len(gone)):.3f} at {least}" for least in (0.5, 0.7)]
        print(f"  {who:<10} removed {len(gone)}; recall {', '.join(line)}; precision {', '.join(exact)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zdata", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--datamap")
    parser.add_argument("--duplodocus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--only", default="quality,repetition,exact,near")
    parser.add_argument("docs", nargs="+")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    docs = {f"d{at}": text for at, text in enumerate(documents(args.docs, args.limit)) if text}
    only = args.only.split(",")
    if "quality" in only and args.datamap:
        filters(args, docs, "gopher-quality", QUALITY, bad_quality())
    if "repetition" in only and args.datamap:
        filters(args, docs, "gopher-repetition", REPETITION, bad_repetition())
    if "exact" in only and (args.datamap or args.duplodocus):
        exact(args, docs)
    if "near" in only and args.duplodocus:
        near(args, docs)


if __name__ == "__main__":
    main()
