"""A store: its sources, documents and tokens."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _zdata, provenance
from ._json import build
from .errors import whole

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Stream:
    """The documents of a source in one split."""

    tokens: int
    documents: int
    text_bytes: int
    digest: str


class Store:
    """A store: a folder that `zdata build` wrote, or a URL of one, as `s3://bucket/prefix`.

    Reads are positional, and every block of 16,384 tokens is checked when this process first reads it.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)
        self._store = _zdata.Store(self.root)
        manifest = json.loads(self._store.manifest())
        self.digest: str = manifest["digest"]
        self.vocab: int = manifest["vocab"]
        self.begin: int | None = manifest["begin"]
        self.end: int | None = manifest["end"]
        self.unit: int = manifest["unit"]
        splits = ("train", "validation")
        self._streams = {
            source["name"]: {split: build(Stream, source[split]) for split in splits} for source in manifest["sources"]
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(self._streams)

    def stream(self, source: str, split: str = "train") -> Stream:
        """The size and digest of a source's split."""
        self._store.starts(source, split, (0, 0))  # An error that knows the names, where there is none.
        return self._streams[source][split]

    def tokens(self, source: str, start: int = 0, stop: int | None = None, split: str = "train") -> np.ndarray:
        """Tokens `start` to `stop - 1` of a stream as int32. They are read once into this array, never copied again."""
        import numpy as np

        if stop is None:
            stop = self.stream(source, split).tokens
        return np.asarray(self._store.tokens(source, split, (whole("start", start), whole("stop", stop))))

    def starts(self, source: str, start: int = 0, stop: int | None = None, split: str = "train") -> np.ndarray:
        """Where documents begin, within tokens `start` to `stop - 1` of a stream."""
        import numpy as np

        if stop is None:
            stop = self.stream(source, split).tokens
        return np.array(self._store.starts(source, split, (whole("start", start), whole("stop", stop))), dtype=np.int64)

    def document(self, source: str, number: int, split: str = "train") -> provenance.Document:
        """A document's provenance, by its number in the stream."""
        return self.documents(source, number, number + 1, split)[0]

    def documents(
        self, source: str, start: int = 0, stop: int | None = None, split: str = "train"
    ) -> list[provenance.Document]:
        """The provenance of documents `start` to `stop - 1`."""
        if stop is None:
            stop = self.stream(source, split).documents
        part = (whole("start", start), whole("stop", stop))
        return [provenance.document(answer) for answer in json.loads(self._store.documents(source, split, part))]

    def document_tokens(self, document: provenance.Document, split: str = "train") -> np.ndarray:
        """The tokens of a document, begin and end markers included."""
        first = document.first_token
        return self.tokens(document.source, first, first + document.tokens, split)

    def find(self, source: str, id: str, split: str = "train") -> list[int]:
        """The numbers of the documents that have this id."""
        return self._store.find(source, split, id)

    def tokenizer(self) -> bytes:
        """The bytes of the `tokenizer.json` that made the tokens."""
        return bytes(self._store.tokenizer())

    def __reduce__(self):
        return (type(self), (self.root,))

    def __repr__(self) -> str:
        return f"Store({self.root!r}, digest={self.digest[:8]}..., sources={list(self.sources)})"
