"""What a curriculum trains on: phases, steps and the share of each source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from . import _zdata, provenance
from ._json import build


@dataclass(frozen=True)
class SourceUse:
    """How a phase uses a source."""

    name: str
    share: float
    """Of the phase's samples, as the mix asks for it; in a ramp, at its first sample."""
    samples: int
    tokens: int
    epochs_before: float
    epochs_after: float
    end_share: float | None = None
    """In a ramp, the share at its last sample."""


@dataclass(frozen=True)
class Phase:
    """A phase, or the part of one between amendments of its mix."""

    name: str
    first_step: int
    last_step: int
    steps: int
    seq_len: int
    batch: int
    """Sequences in a step, in the first one if they change."""
    micro_batch: int
    """Sequences in a micro-batch."""
    samples: int
    tokens: int
    """Without padding."""
    padding: int
    digest: str
    """The plan's digest up to the phase's last step."""
    sources: tuple[SourceUse, ...]
    batches: tuple[tuple[int, int], ...] = ()
    """Where the batch changes: from a step on, sequences in a step."""
    curve: str | None = None
    """Of a ramp of the mix: linear, cosine or table."""


@dataclass(frozen=True)
class Source:
    """A source over the whole run."""

    name: str
    tokens: int
    documents: int
    taken: int
    """Tokens that the run takes from it, repeats included."""
    epochs: float
    max_epochs: int


class Plan:
    """A curriculum's plan. It refuses what cannot run, as `zdata plan` does.

    `overrides` replaces keys of the file: `{"seed": 3, "phase.first.steps": 10}`; an element of a list of tables is
    named by its `name` or by its number from 0. Digests are those of a file that says the same.

    Where a mix reacts to the loss, data is fixed as far as losses are known: those of the run in the folder `run`.
    """

    def __init__(
        self,
        curriculum: str | os.PathLike[str],
        overrides: Mapping[str, Any] | None = None,
        *,
        run: str | os.PathLike[str] | None = None,
    ):
        self.path = os.fspath(curriculum)
        self.overrides = dict(overrides or {})
        self.run = None if run is None else os.fspath(run)
        changes = json.dumps(self.overrides) if self.overrides else None
        self._curriculum = _zdata.Curriculum(self.path, changes, self.run)

    @property
    def steps(self) -> int:
        """The last step; steps are 1 to this."""
        return self._curriculum.steps

    @property
    def fixed_until(self) -> int:
        """The last step whose data is fixed: `steps`, unless a mix reacts to losses that are not known."""
        return self._curriculum.fixed_until

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        return self._curriculum.samples

    @property
    def vocab(self) -> int:
        """Token ids of the tokenizer that all stores share: ids are below it."""
        return self._curriculum.vocab

    @cached_property
    def digest(self) -> str:
        """The plan's digest: equal plans give equal batches."""
        return self.digest_through(self.steps)

    def digest_through(self, step: int) -> str:
        """The digest of all that decides steps 1 to `step`; later phases do not change it."""
        return self._curriculum.digest_through(step)

    @cached_property
    def _answer(self) -> dict[str, Any]:
        return json.loads(self._curriculum.plan())

    @property
    def tokens(self) -> int:
        """Tokens of text in the whole run, padding left out."""
        return self._answer["tokens"]

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in order."""

        def phase(answer):
            def use(source):
                return build(SourceUse, source, end_share=source["end"]["share"] if "end" in source else None)

            batches = tuple((first, batch) for first, batch in answer.get("batches", ()))
            return build(Phase, answer, sources=tuple(map(use, answer["sources"])), batches=batches)

        return tuple(phase(answer) for answer in self._answer["phases"])

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the stores, unused ones included."""
        return tuple(build(Source, answer) for answer in self._answer["sources"])

    def where(self, id: str, source: str | None = None) -> list[provenance.Whereabouts]:
        """Every place at which the run sees the documents with this id, as `zdata where` finds it."""
        return [provenance.whereabouts(answer) for answer in json.loads(self._curriculum.whereabouts(id, source))]

    def __reduce__(self):
        return (partial(type(self), run=self.run), (self.path, self.overrides))

    def __repr__(self) -> str:
        return f"Plan({self.path!r}, steps={self.steps}, digest={self.digest[:8]}...)"
