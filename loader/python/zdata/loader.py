"""Batches of a curriculum's steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._batch import Batch
from .errors import whole
from .plan import Plan


class Loader:
    """Reads the batches of a curriculum, or the part of rank `rank` among `world`.

    A batch is a function of the curriculum, the store's content, the step and the rank: no state, no random generator.
    May be copied to other processes (spawn) and used after a fork; each process opens its own files.
    """

    def __init__(
        self,
        curriculum: str | os.PathLike[str] | Plan,
        rank: int = 0,
        world: int = 1,
        *,
        overrides: Mapping[str, Any] | None = None,
    ):
        if isinstance(curriculum, Plan):
            if overrides:
                raise TypeError("overrides are given to Plan")
            self.plan = curriculum
        else:
            self.plan = Plan(curriculum, overrides)
        self.rank, self.world = whole("rank", rank), whole("world", world)
        self._curriculum = self.plan._curriculum
        self._curriculum.micro_batches(1, rank, world)  # An error where the rank is not below the world's size.

    @property
    def steps(self) -> int:
        """The last step; steps are 1 to this."""
        return self.plan.steps

    def batch(self, step: int) -> Batch:
        """This rank's part of a step. A rank that has no micro-batch of a step gets a batch without rows."""
        return Batch(self._curriculum.batch(whole("step", step), self.rank, self.world))

    def micro_batch(self, step: int, index: int) -> Batch:
        """One of this rank's micro-batches of a step, from 0; nothing else is read."""
        return Batch(self._curriculum.micro_batch(whole("step", step), self.rank, self.world, whole("index", index)))

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Some rows of a step, of whichever rank."""
        return Batch(self._curriculum.rows(whole("step", step), [whole("row", row) for row in rows]))

    def micro_batch_count(self, step: int) -> int:
        """How many micro-batches of a step this rank has."""
        return self._curriculum.micro_batches(whole("step", step), self.rank, self.world)

    def sample(self, number: int) -> Batch:
        """The row with this global sample number, from 0."""
        step, row = self._curriculum.step_of(whole("number", number))
        return self.rows(step, [row])

    def batches(self, start: int = 1, stop: int | None = None, *, threads: int = 2, depth: int = 4) -> Iterator[Batch]:
        """The batches of steps `start` to `stop - 1`, read ahead by threads, which belong to this iterator."""
        stop = self.steps + 1 if stop is None else stop
        part = (self.rank, self.world)
        process, step = os.getpid(), whole("start", start)
        stop, threads, depth = whole("stop", stop), whole("threads", threads), whole("depth", depth)
        ahead = self._curriculum.ahead((step, stop), part, threads, depth)
        while step < stop:
            if os.getpid() != process:  # A fork has no threads.
                process, ahead = os.getpid(), self._curriculum.ahead((step, stop), part, threads, depth)
            yield Batch(next(ahead))
            step += 1

    def digests(self, start: int = 1, stop: int | None = None, *, threads: int = 1) -> list[str]:
        """The digests of whole steps `start` to `stop - 1`, as `zdata digest` prints them."""
        stop = self.steps + 1 if stop is None else stop
        return self._curriculum.digests(whole("start", start), whole("stop", stop), whole("threads", threads))

    def __reduce__(self):
        return (type(self), (self.plan, self.rank, self.world))

    def __repr__(self) -> str:
        return f"Loader({self.plan!r}, rank={self.rank}, world={self.world})"
