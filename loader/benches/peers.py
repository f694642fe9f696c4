"""Loaders of other projects next to ours: the same documents, one core, batches as torch tensors. Prints a table.

    python -m venv peers && peers/bin/pip install ./loader/python mosaicml-streaming==0.13.0
    peers/bin/pip install -U megatron-core pybind11 litdata grain datatrove datasets transformers
    peers/bin/python loader/benches/peers.py [--tokens 96] [--rounds 5] [--data FOLDER] [--only NAME ...]

(Two lines, because the packages do not agree on one release of transformers.) Three sources of random documents are
written in each project's format by that project's own writer. Each measurement is a process of its own, pinned to core
0; a worker (ours: a thread of the loader) has core 1. The files are in the page cache. Rounds visit all loaders in
turn, so that other work on the machine meets all of them. Ctrl-C prints what was measured so far.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARES = {"web": 0.5, "code": 0.3, "math": 0.2}
VOCAB, END = 50_000, 0
BATCH_TOKENS = 1 << 16
# Seconds of reading before the clock starts, and of processor time under it.
WARM, MEASURED = 1.5, 2.0
# Seconds after which a process is given up.
LIMIT = 45


def documents(tokens):
    """Each source's documents: log-normal lengths, 900 tokens on average; the last token is END."""
    for number, (name, share) in enumerate(SHARES.items()):
        random = np.random.default_rng(number)
        lengths = random.lognormal(6.3, 1.0, int(tokens * share / 900)).astype(np.int64) + 2
        ids = random.integers(1, VOCAB, lengths.sum(), dtype=np.uint16)
        ends = lengths.cumsum()
        ids[ends - 1] = END
        yield name, ids, ends


def rows_of(ids, seq_len):
    """Text cut into rows of `seq_len` tokens and the label of the last: what a format without documents keeps."""
    count = (len(ids) - 1) // seq_len
    return np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)[:: seq_len][:count]


# Writers: `folder` is for this project and this row length.


def write_numpy(folder, seq_len, sources):
    with open(folder / "rows.bin", "wb") as file:
        for _, ids, _ in sources:
            rows_of(ids, seq_len).tofile(file)


def write_megatron(folder, _, sources):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, ids, ends in sources:
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        builder.add_document(torch.from_numpy(ids.astype(np.int32)), np.diff(ends, prepend=0).tolist())
        # One document a sequence, not one document of all sequences.
        builder.document_indices = list(range(len(ends) + 1))
        builder.finalize(str(folder / f"{name}.idx"))


def write_zdata(folder, seq_len, sources):
    words = {f"t{i}": i for i in range(1, VOCAB)} | {"<end>": END}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None, "added_tokens": [],
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "<end>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_megatron(folder, seq_len, sources)
    named = [part for name in SHARES for part in ("--source", f"{name}={folder / name}.bin")]
    subprocess.run([sys.executable, "-m", "zdata", "import", folder / "store", "--format", "megatron", "--tokenizer",
                    folder / "tokenizer.json", *named], check=True, stdout=subprocess.DEVNULL)
    steps = sum(len(ids) for _, ids, _ in sources) * 100 // BATCH_TOKENS
    mix = ", ".join(f"{name} = {share}" for name, share in SHARES.items())
    limits = "".join(f"[source.{name}]\nmax_epochs = 200\n" for name in SHARES)
    (folder / "run.toml").write_text(f'store = "store"\nseed = 1\n{limits}[[phase]]\nname = "only"\nsteps = {steps}\n'
                                     f"seq_len = {seq_len}\nbatch = {BATCH_TOKENS // seq_len}\nmix = {{ {mix} }}\n")


def write_streaming(folder, seq_len, sources):
    from streaming import MDSWriter

    for name, ids, _ in sources:
        with MDSWriter(out=str(folder / name), columns={"tokens": f"ndarray:uint16:{seq_len + 1}"}) as writer:
            for row in rows_of(ids, seq_len):
                writer.write({"tokens": row})


def document_of(item):
    ids, begin, end = item
    return np.load(ids, mmap_mode="r")[begin:end].copy()


def write_litdata(folder, seq_len, sources):
    import litdata

    for name, ids, ends in sources:
        np.save(folder / f"{name}.npy", ids)
        cuts = [0, *ends[1023::1024].tolist(), len(ids)]
        inputs = [(str(folder / f"{name}.npy"), begin, end) for begin, end in zip(cuts, cuts[1:])]
        litdata.optimize(document_of, inputs, str(folder / name), chunk_bytes="64MB", num_workers=1, verbose=False,
                         item_loader=litdata.TokensLoader(block_size=seq_len + 1))
        (folder / f"{name}.npy").unlink()


def write_grain(folder, seq_len, sources):
    from array_record.python.array_record_module import ArrayRecordWriter

    for name, ids, ends in sources:
        for kind, items in (("rows", rows_of(ids, seq_len)), ("documents", np.split(ids, ends[:-1]))):
            writer = ArrayRecordWriter(str(folder / f"{name}.{kind}"), "group_size:1,uncompressed")
            for item in items:
                writer.write(item.tobytes())
            writer.close()


def write_datasets(folder, seq_len, sources):
    from datasets import Dataset, Features, List, Value

    features = Features({"tokens": List(Value("uint16"), length=seq_len + 1)})
    for name, ids, _ in sources:
        rows = rows_of(ids, seq_len)
        Dataset.from_generator(lambda: ({"tokens": row} for row in rows), features=features,
                               cache_dir=str(folder / "cache")).save_to_disk(folder / name)
    shutil.rmtree(folder / "cache")


def write_datatrove(folder, _, sources):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for name, ids, ends in sources:
        file = TokenizedFile(str(folder / "data"), f"{name}.ds", token_size=2)
        file.write_bytes(ids.tobytes(), ends.tolist())
        file.close()


# Loaders: each returns `start(batch)`, an iterator from that batch on, and `seek(batch)`, which prepares what the project
# keeps in a checkpoint and returns a function that makes an iterator from there.


def sliced(dataset, rows, workers, total):
    """A map-style dataset under torch's DataLoader."""
    from torch.utils.data import DataLoader

    def start(batch=0):
        return iter(DataLoader(dataset, rows, sampler=range(batch * rows, total * rows), num_workers=workers))

    return start, lambda batch: lambda: start(batch)


def open_numpy(folder, seq_len, rows, workers, total, columns=False):
    import torch

    data = np.memmap(folder / "rows.bin", np.uint16, "r").reshape(-1, seq_len + 1)
    order = np.random.default_rng(1).permutation(len(data))

    def start(batch=0):
        for batch in range(batch, total):
            ids = torch.from_numpy(data[order[batch * rows : (batch + 1) * rows]].astype(np.int64))
            batch = (ids[:, :-1], ids[:, 1:])
            if columns:
                shape = (len(ids), seq_len)
                batch = (*(part.contiguous() for part in batch), torch.ones(shape), torch.arange(seq_len).repeat(len(ids), 1))
            yield batch

    return start, lambda batch: lambda: start(batch)


def open_zdata(folder, seq_len, rows, workers, total, transform="tensors", own=True):
    from torch.utils.data import DataLoader

    import zdata.torch

    def start(batch=0):
        options = {"start": batch + 1, "transform": getattr(zdata.torch, transform)}
        if own:
            return iter(zdata.torch.IterableDataset(loader, threads=workers, **options))
        return iter(DataLoader(zdata.torch.IterableDataset(loader, **options), batch_size=None, num_workers=workers))

    loader = zdata.Loader(folder / "run.toml")
    return start, lambda batch: lambda: start(batch)


def open_megatron(folder, seq_len, rows, workers, total, boundaries=True):
    import types

    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    tokenizer = types.SimpleNamespace(vocab_size=VOCAB, eod=END, pad=VOCAB, unique_identifiers={"class": "bench"})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=seq_len, blend=([str(folder / name) for name in SHARES], list(SHARES.values())),
        split="1", path_to_cache=str(folder / "cache"), tokenizer=tokenizer, reset_position_ids=boundaries,
        reset_attention_mask=False, eod_mask_loss=boundaries, create_attention_mask=False)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [total * rows, 0, 0], lambda: True, config)
    return sliced(builder.build()[0], rows, workers, total)


def open_datatrove(folder, seq_len, rows, workers, total):
    from datatrove.utils.dataset import DatatroveFolderDataset

    dataset = DatatroveFolderDataset(str(folder / "data"), seq_len, "*.ds", token_size=2, shuffle=True, return_positions=True)
    return sliced(dataset, rows, workers, total)


def open_streaming(folder, seq_len, rows, workers, total):
    import torch
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Rows(StreamingDataset):
        def __getitem__(self, index):
            return torch.from_numpy(super().__getitem__(index)["tokens"].astype(np.int64))

    clean_stale_shared_memory()
    streams = [Stream(local=str(folder / name), proportion=share) for name, share in SHARES.items()]
    dataset = Rows(streams=streams, shuffle=True, shuffle_seed=1, batch_size=rows)
    loader = StreamingDataLoader(dataset, batch_size=rows, num_workers=workers)

    def seek(batch):
        state = loader.state_dict() | {"sample_in_epoch": batch * rows, "epoch": 0}
        return lambda: (loader.load_state_dict(state), iter(loader))[1]

    return lambda: iter(loader), seek


def after(batches, count):
    """Reads so many batches: the state there is not to be had in another way."""
    for _ in range(count):
        next(batches)
    return batches


def open_litdata(folder, seq_len, rows, workers, total):
    import litdata
    import torch

    def loader():
        parts = [litdata.StreamingDataset(str(folder / name), item_loader=litdata.TokensLoader(seq_len + 1), shuffle=True, seed=1,
                                          drop_last=True) for name in SHARES]
        both = litdata.CombinedStreamingDataset(parts, weights=list(SHARES.values()), iterate_over_all=False, seed=1)
        return litdata.StreamingDataLoader(both, batch_size=rows, num_workers=workers, drop_last=True,
                                           collate_fn=lambda items: torch.from_numpy(np.stack(items).astype(np.int64)))

    def seek(batch):
        read = loader()
        after(iter(read), batch)
        state, other = read.state_dict(), loader()
        return lambda: (other.load_state_dict(state), iter(other))[1]

    first = loader()
    return lambda: iter(first), seek


def open_grain(folder, seq_len, rows, workers, total, packed=False):
    import grain
    import torch
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    def source(name, number):
        records = ArrayRecordDataSource(str(folder / f"{name}.{'documents' if packed else 'rows'}"))
        return grain.MapDataset.source(records).seed(number).shuffle().map(lambda raw: {"tokens": np.frombuffer(raw, np.uint16)})

    mixed = grain.MapDataset.mix([source(name, number) for number, name in enumerate(SHARES)], list(SHARES.values()))
    read = mixed.to_iter_dataset(grain.ReadOptions(num_threads=0))
    if packed:
        read = grain.experimental.ConcatThenSplitIterDataset(read, length_struct={"tokens": seq_len + 1})
    read = read.batch(rows, drop_remainder=True)
    read = read.map(lambda batch: {key: torch.from_numpy(value.astype(np.int64)) for key, value in batch.items()})
    if workers:
        read = read.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))

    def seek(batch):
        state, other = after(iter(read), batch).get_state(), iter(read)
        return lambda: (other.set_state(state), other)[1]

    return lambda: iter(read), seek


def open_datasets(folder, seq_len, rows, workers, total, streaming=False):
    import datasets
    from torch.utils.data import DataLoader

    parts = [datasets.load_from_disk(folder / name) for name in SHARES]
    mix = {"probabilities": list(SHARES.values()), "seed": 1, "stopping_strategy": "first_exhausted"}
    if not streaming:
        mixed = datasets.interleave_datasets([part.shuffle(seed=1) for part in parts], **mix).with_format("torch")
        return sliced(mixed, rows, workers, len(mixed) // rows)
    parts = [part.to_iterable_dataset(num_shards=8).shuffle(seed=1, buffer_size=1000) for part in parts]
    mixed = datasets.interleave_datasets(parts, **mix).with_format("torch")

    def start(batch=0):
        return iter(DataLoader(mixed, rows, num_workers=workers, drop_last=True))

    def seek(batch):
        after(start(), batch)
        state = mixed.state_dict()
        return lambda: (mixed.load_state_dict(state), start())[1]

    return start, seek


MIXED, ROWS = "shuffle, mix", "rows cut when written"
# Name: folder, opener, its options, what a batch is and what work makes it.
LOADERS = {
    "zdata": ("zdata", open_zdata, {}, f"{MIXED}, boundaries; ids, labels, positions int32, mask, cu_seqlens, digest"),
    "zdata, for_transformers": ("zdata", open_zdata, {"transform": "for_transformers"}, "the same; ids, labels with -100, positions int64"),
    "zdata in a DataLoader": ("zdata", open_zdata, {"own": False}, "the same as zdata"),
    "numpy gather": ("numpy", open_numpy, {}, f"shuffle; {ROWS}; ids int64, labels are a view"),
    "numpy gather, columns": ("numpy", open_numpy, {"columns": True}, "the same; ids, labels, positions int64, mask float32"),
    "Megatron GPTDataset": ("megatron", open_megatron, {}, f"{MIXED}, boundaries; ids, labels, positions int64, mask float32"),
    "Megatron, no boundaries": ("megatron", open_megatron, {"boundaries": False}, f"{MIXED}; the same columns"),
    "MosaicML Streaming": ("streaming", open_streaming, {}, f"{MIXED}; {ROWS}; ids int64, labels are a view"),
    "LitData": ("litdata", open_litdata, {}, f"{MIXED}; ids int64, labels are a view"),
    "Grain": ("grain", open_grain, {}, f"{MIXED}; {ROWS}; ids int64, labels are a view"),
    "Grain, packing": ("grain", open_grain, {"packed": True}, f"{MIXED}, boundaries; ids, segments, positions int64"),
    "HF datasets, map": ("datasets", open_datasets, {}, f"{MIXED}; {ROWS}; ids int64, labels are a view"),
    "HF datasets, streaming": ("datasets", open_datasets, {"streaming": True}, f"buffer shuffle, mix; {ROWS}; ids int64"),
    "datatrove": ("datatrove", open_datatrove, {}, "boundaries, order of files; ids int64, positions int64"),
}
WRITERS = {"numpy": write_numpy, "zdata": write_zdata, "megatron": write_megatron, "streaming": write_streaming,
           "litdata": write_litdata, "grain": write_grain, "datasets": write_datasets, "datatrove": write_datatrove}


def measure(name, data, seq_len, tokens, workers):
    """One process: the numbers of a loader, as JSON."""
    os.sched_setaffinity(0, {0})
    begin = float(os.environ["BEGIN"])
    import torch

    torch.set_num_threads(1)
    folder, opener, options, _ = LOADERS[name]
    rows = BATCH_TOKENS // seq_len
    total = int(tokens * 0.9) // BATCH_TOKENS
    imported = time.time()
    start, seek = opener(data / f"{folder}-{seq_len}", seq_len, rows, workers, total, **options)
    batches = start()
    if workers:  # They were started just now, or are at the first batch.
        spread(next(batches, None))
    batch = next(batches)
    found = {"construct": time.time() - imported, "first": time.time() - begin}

    columns = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else [batch]
    largest = max(column.numel() for column in columns if isinstance(column, torch.Tensor))
    assert BATCH_TOKENS <= largest <= BATCH_TOKENS + rows, f"a batch of {largest} tokens"

    def read(seconds, clock):
        nonlocal batches
        began, count = clock(), 0
        while clock() - began < seconds:
            if next(batches, None) is None:
                batches = start()
                continue
            count += 1
        return count * BATCH_TOKENS / (clock() - began)

    read(WARM, time.time)
    found["rate"] = read(MEASURED, time.time if workers else time.process_time)
    if not workers:
        del batches
        go = seek(total // 2)
        began = time.time()
        next(go())
        found["seek"] = time.time() - began
    status = Path("/proc/self/status").read_text().split()
    found["peak"] = int(status[status.index("VmHWM:") + 1]) / 1024
    print("FOUND" + json.dumps(found), flush=True)
    os._exit(0)


def spread(_):
    """Workers, processes or threads, have the other core."""
    own = Path(f"/proc/{os.getpid()}/task")
    threads = [thread.name for thread in own.iterdir() if thread.name != str(os.getpid())]
    for worker in threads + (own / str(os.getpid()) / "children").read_text().split():
        for thread in Path(f"/proc/{worker}/task").iterdir() if worker not in threads else [Path(worker)]:
            os.sched_setaffinity(int(thread.name), {1})


def spawn(args, name, seq_len, workers):
    command = [sys.executable, __file__, "--measure", name, str(seq_len), str(workers), "--data", str(args.data),
               "--tokens", str(args.tokens)]
    quiet = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK_LITDATA": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        environment = os.environ | quiet | {"BEGIN": str(time.time())}
        # Files instead of pipes, which a worker that outlives its process would keep open.
        ran = subprocess.Popen(command, stdout=out, stderr=log, env=environment, start_new_session=True)
        try:
            ran.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{name}, {seq_len}, {workers} worker(s): nothing after {LIMIT} s", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()
        out.seek(0)
        log.seek(0)
        line = [line for line in out if line.startswith("FOUND")]
        if not line:
            print(f"{name}, {seq_len}, {workers} worker(s): no result\n{log.read()[-1500:]}", file=sys.stderr)
            return None
        return json.loads(line[0][5:])


def prepare(args):
    """Writes what is missing, and reads every file once into the page cache."""
    sources = None
    folders = dict.fromkeys(LOADERS[name][0] for name in args.only)
    for seq_len in args.seq_len:
        for folder in folders:
            place = args.data / f"{folder}-{seq_len}"
            if not (place / "done").exists():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                sources = sources or list(documents(args.tokens * 1_000_000))
                print(f"writing {place}", file=sys.stderr)
                WRITERS[folder](place, seq_len, sources)
                (place / "done").touch()
            for file in filter(Path.is_file, place.rglob("*")):
                with open(file, "rb") as opened:
                    while opened.read(1 << 24):
                        pass


def table(args, seq_len, found):
    one = lambda name, key: [each[key] for each in found[name, seq_len, 0]]
    print(f"\nRows of {seq_len}, {BATCH_TOKENS // seq_len} in a batch:\n")
    print("| loader | M tokens/s a core | slowest, fastest | zdata / it | with 1 worker | first batch, s | construction alone, s "
          "| seek to the middle, ms | peak MB |\n" + "|---" * 9 + "|")
    for name in args.only:
        if not found[name, seq_len, 0]:
            print(f"| {name} | no result |" + " |" * 7)
            continue
        rates = [rate / 1e6 for rate in one(name, "rate")]
        # Of the same round, so that both met the same machine.
        pairs = zip(found.get(("zdata", seq_len, 0), []), found[name, seq_len, 0])
        ratios = [ours["rate"] / its["rate"] for ours, its in pairs]
        worker = [each["rate"] / 1e6 for each in found[name, seq_len, 1]]
        middle = lambda key: statistics.median(one(name, key))
        cells = [name, f"{statistics.median(rates):.1f}", f"{min(rates):.1f}, {max(rates):.1f}", f"{statistics.median(ratios):.1f}" if ratios else "",
                 f"{statistics.median(worker):.1f}" if worker else "", f"{middle('first'):.2f}", f"{middle('construct'):.3f}",
                 f"{middle('seek') * 1e3:.1f}", f"{middle('peak'):.0f}"]
        print("| " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/zdata-peers"))
    parser.add_argument("--tokens", type=int, default=96, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--measure", nargs=3)
    args = parser.parse_args()
    if args.measure:
        name, seq_len, workers = args.measure
        return measure(name, args.data, int(seq_len), args.tokens * 1_000_000, int(workers))
    prepare(args)
    found = {(name, seq_len, workers): [] for name in args.only for seq_len in args.seq_len for workers in (0, 1)}
    with contextlib.suppress(KeyboardInterrupt):  # A table of what there is.
        rounds(args, found)
    report(args, found)


def rounds(args, found):
    """Fills `found`: a list of results for each loader, row length and number of workers."""
    for turn in range(args.rounds):
        for name, seq_len, workers in found:
            # A loader that fails once is not tried again; numpy's rows have no workers. One round with workers suffices.
            if (turn == 0 or found[name, seq_len, workers]) and not (workers and (turn or "numpy" in name)):
                one = spawn(args, name, seq_len, workers)
                found[name, seq_len, workers] += [one] if one else []
                if one:
                    one["load"] = os.getloadavg()[0]
                print(turn, name, seq_len, workers, one, file=sys.stderr, flush=True)


def report(args, found):
    """Prints what was found as Markdown."""
    loads = [one["load"] for several in found.values() for one in several]
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line]
    print(f"{datetime.date.today()}, {cpu[0]}, {len(cpu)} cores, load {min(loads):.1f} to {max(loads):.1f}, Python {platform.python_version()}, "
          f"{args.tokens} M tokens, {args.rounds} rounds")
    for seq_len in args.seq_len:
        table(args, seq_len, found)
    print("\n| loader | work; a batch |\n|---|---|")
    for name in args.only:
        print(f"| {name} | {LOADERS[name][3]} |")


if __name__ == "__main__":
    main()
