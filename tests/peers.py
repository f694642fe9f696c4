"""The other projects' own code, asked to read what zdata exported and to write what zdata is to import.

    peers.py read FORMAT FOLDER SPLIT        JSON: [[id or null, [tokens]], ...]
    peers.py write FORMAT FOLDER DOCS.json   files of those documents; FORMAT may be mds:COMPRESSION
    peers.py open STORE                      JSON: what pyarrow finds in a store

Needs the packages that `exchange.rs` names, without torch: a package that is absent is stood in for, since the code that
reads and writes these files does not use it. The modules under test are the real ones.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types


class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Thing,), {})

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return cls

    __ror__ = __or__


class Thing(metaclass=Meta):
    """Whatever an absent package would have held: a base class, an annotation, a decorator's argument."""

    def __init__(self, *_, **__):
        pass


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    ABSENT = {
        "torch", "huggingface_hub", "tokenizers", "cached_path", "dataclass_extensions", "filelock", "requests", "rich",
        "yaml", "PIL", "typing_extensions", "humanize", "loguru", "tqdm", "msvcrt",
        "_winapi", "org",
    }

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return stand_in(spec.name)

    def exec_module(self, module):
        pass


def stand_in(name):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda word: getattr(Thing, word)
    return module


def bare(*names):
    """Packages whose __init__ pulls in a whole trainer: their modules are imported, their __init__ is not run."""
    for name in names:
        module = types.ModuleType(name)
        places = [os.path.join(place, *name.split(".")) for place in sys.path]
        module.__path__ = [place for place in places if os.path.isdir(place)]
        sys.modules[name] = module


class Tensor(list):
    """What Megatron's writer wants of a tensor."""

    def numpy(self):
        return list(self)


def megatron():
    bare("megatron", "megatron.core", "megatron.core.datasets")
    for name in ("megatron.core.utils", "megatron.core.msc_utils"):
        sys.modules[name] = stand_in(name)
    sys.modules["megatron.core.msc_utils"].MultiStorageClientFeature = type(
        "Feature", (), {"is_enabled": staticmethod(lambda: False)}
    )
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def read_megatron(folder, split):
    data = megatron().IndexedDataset(os.path.join(folder, split), mmap=True)
    ends = data.document_indices.tolist()
    for first, end in zip(ends, ends[1:]):
        yield None, [int(token) for sequence in range(first, end) for token in data[sequence]]


def write_megatron(folder, docs):
    peer = megatron()
    builder = peer.IndexedDatasetBuilder(os.path.join(folder, "peer.bin"), dtype=peer.DType.optimal_dtype(50000))
    for number, (_, tokens) in enumerate(docs):
        # Every third document in two sequences, as sentence splitting makes them.
        cut = len(tokens) // 2 if number % 3 == 0 else len(tokens)
        for part in (tokens[:cut], tokens[cut:]):
            if part:
                builder.add_item(Tensor(part))
        builder.end_document()
    builder.finalize(os.path.join(folder, "peer.idx"))


def read_datatrove(folder, split):
    import numpy
    from datatrove.pipeline.tokens.merger import load_doc_ends

    folder = os.path.join(folder, split)
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".ds")):
        path = os.path.join(folder, name)
        size = int(open(path + ".metadata").readline().split("|")[1])
        tokens = numpy.fromfile(path, dtype={2: "<u2", 4: "<u4"}[size])
        ends = load_doc_ends(open(path + ".index", "rb"))
        for part in numpy.split(tokens, ends[:-1].astype(int)):
            yield None, part.tolist()


def write_datatrove(folder, docs):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(folder, "peer.ds", tokenizer_name_or_path="t", token_size=2)
    for _, tokens in docs:
        file.write(tokens, None)
    file.close()


def olmo():
    bare("olmo_core.data")
    from olmo_core.data import utils

    # What finds a file in a bucket or here: here.
    utils.resource_path = lambda folder, name, local_cache=None: os.path.join(folder, name)
    return utils


def read_olmo(folder, split):
    import numpy

    peer = olmo()
    folder = os.path.join(folder, split)
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".npy")):
        path = os.path.join(folder, name)
        for first, end in peer.iter_document_indices(path, use_array_if_local=False, dtype=numpy.uint16):
            yield None, peer.load_array_slice(path, first, end, numpy.uint16).tolist()


def write_olmo(folder, docs):
    import pathlib

    import numpy

    path = pathlib.Path(folder, "peer.npy")
    numpy.array([token for _, tokens in docs for token in tokens], dtype=numpy.uint16).tofile(path)
    last = {tokens[-1] for _, tokens in docs}
    assert len(last) == 1, "every document ends with the same token"
    olmo().write_document_indices(path, dtype=numpy.uint16, eos_token_id=last.pop())


def mds():
    bare("streaming", "streaming.base")
    from streaming.base.format.mds import reader, writer

    return reader, writer


def read_mds(folder, split):
    reader, _ = mds()
    index = json.load(open(os.path.join(folder, split, "index.json")))
    for shard in index["shards"]:
        shard = reader.MDSReader.from_json(folder, split, shard)
        with open(os.path.join(folder, split, shard.raw_data.basename), "rb") as file:
            from streaming.base.hashing import get_hash

            data = file.read()
            assert all(get_hash(kind, data) == value for kind, value in shard.raw_data.hashes.items())
        for number in range(shard.samples):
            sample = shard.get_item(number)
            yield sample["id"], sample["tokens"].tolist()


def write_mds(folder, docs, compression=None):
    import numpy

    _, writer = mds()
    from streaming.base.hashing import get_hashes

    columns = {"tokens": "ndarray:int32", "id": "str", "extra": "pkl"}
    # Every sum that we check, of both files.
    known = {"md5", "sha1", "sha256", "xxh64", "xxh128"}
    assert known <= get_hashes()
    more = {"hashes": sorted(known), "compression": compression}
    with writer.MDSWriter(columns=columns, out=os.path.join(folder, "peer"), **more) as out:
        for number, (_, tokens) in enumerate(docs):
            value = numpy.array(tokens, dtype=numpy.int32)
            out.write({"tokens": value, "id": f"peer-{number}", "extra": {"a": number}})


def open_store(store):
    """The tokens, starts and documents of the training shards, source by source, counted in their stream."""
    import glob

    import pyarrow.ipc
    import pyarrow.parquet

    found = {"tokens": [], "starts": [], "documents": []}
    for source in sorted(entry.path for entry in os.scandir(store) if entry.is_dir()):
        first = 0
        for path in sorted(glob.glob(os.path.join(source, "*", "tokens-train-*.arrow"))):
            other = path.replace("tokens-train-", "{}-train-")
            starts = pyarrow.ipc.open_file(other.format("starts")).read_all()["start"].to_pylist()
            rows = pyarrow.parquet.read_table(other.format("documents").replace(".arrow", ".parquet")).to_pylist()
            found["starts"].append([first + start for start in starts])
            found["documents"].append([row | {"first_token": first + row["first_token"]} for row in rows])
            found["tokens"].append(pyarrow.ipc.open_file(path).read_all()["token"].to_pylist())
            first += len(found["tokens"][-1])
    return found


def main(command, *words):
    if command == "open":
        answer = open_store(*words)
    else:
        form, folder, rest = words
        # Only now: numpy and the packages themselves are the real ones wherever they are there.
        sys.meta_path.append(StandIn())
        if command == "read":
            answer = list(globals()["read_" + form](folder, rest))
        else:
            os.makedirs(folder, exist_ok=True)
            form, *compression = form.split(":", 1)
            answer = globals()["write_" + form](folder, json.load(open(rest)), *compression)
    json.dump(answer, sys.stdout)


main(*sys.argv[1:])
