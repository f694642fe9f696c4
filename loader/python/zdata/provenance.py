"""Where text comes from, and where a run sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ._json import build, pair


@dataclass(frozen=True)
class Document:
    """A document of a store."""

    id: str
    number: int
    """Its number in the stream."""
    source: str
    file: str
    row: int
    """Line (from 1) of a JSON Lines file, row (from 0) of a row group, 0 for a whole file."""
    group: int | None
    """Row group of a Parquet file, record batch of an Arrow file."""
    bytes: tuple[int, int] | None
    """Its bytes in the decompressed file; None for columnar files."""
    origin: str
    """The same in words."""
    first_token: int
    tokens: int
    kept: Mapping[str, str]
    """The columns that the corpus file keeps."""


@dataclass(frozen=True)
class Infill:
    """How a run of tokens is rearranged: its parts, in tokens of the document."""

    mode: str
    """psm (prefix, suffix, middle) or spm (suffix, prefix, middle)."""
    prefix: tuple[int, int]
    middle: tuple[int, int]
    suffix: tuple[int, int]
    left_out: tuple[int, int]
    """The tokens that make place for the three sentinels."""


@dataclass(frozen=True)
class DocumentPart:
    """A run of tokens of one document in a sequence."""

    id: str
    document: int
    """The document's number in its source's training stream."""
    file: str
    row: int
    group: int | None
    bytes: tuple[int, int] | None
    origin: str
    tokens: tuple[int, int]
    """Where the run stands in the sequence."""
    of_document: tuple[int, int]
    """Where the run stands in the document."""
    document_tokens: int
    banned: bool
    """Whether an amendment hides it here."""
    text: str | None = None
    infill: Infill | None = None
    """How it is rearranged for fill-in-the-middle, if it is."""


@dataclass(frozen=True)
class Sighting:
    """A place at which a run sees a document."""

    step: int
    sequence: int
    """Counted in the step."""
    offset: int
    """Where in the sequence its tokens begin."""
    tokens: tuple[int, int]
    """Which of its tokens."""
    sample: int
    banned: bool
    infill: Infill | None = None
    """How it is rearranged there for fill-in-the-middle, if it is."""


@dataclass(frozen=True)
class Whereabouts:
    """A document that has an id, with every place at which the run sees it."""

    id: str
    source: str
    split: str
    document: int
    origin: str
    tokens: int
    seen: tuple[Sighting, ...]


def document(answer) -> Document:
    return build(Document, answer, bytes=pair(answer["bytes"]))


def part(answer) -> DocumentPart:
    pairs = {key: pair(answer[key]) for key in ("bytes", "tokens", "of_document")}
    return build(DocumentPart, answer, infill=infill(answer), **pairs)


def infill(answer) -> Infill | None:
    found = answer.get("infill")
    parts = ("prefix", "middle", "suffix", "left_out")
    return found and build(Infill, found, **{part: pair(found[part]) for part in parts})


def whereabouts(answer) -> Whereabouts:
    seen = tuple(build(Sighting, place, tokens=pair(place["tokens"]), infill=infill(place)) for place in answer["seen"])
    return build(Whereabouts, answer, seen=seen)
