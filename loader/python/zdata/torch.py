"""Datasets for PyTorch, and batches in the shapes that its libraries take.

A dataset's items are dicts of tensors with the keys of `tensors`, or of what `transform` makes of a `zdata.Batch`. Use
`batch_size=None`: an item is a batch already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from ._batch import Batch
from ._zdata import THREADS_MAX
from .loader import Loader
from .plan import Plan

UNITS = ("step", "micro_batch")


def tensors(batch: Batch) -> dict[str, Any]:
    """A batch as tensors, which share its memory.

    tokens, labels, position_ids (int32) and loss_mask (uint8) are `[rows, seq_len]`; loss_weights (float32, `[rows]`)
    multiply the losses of a row; cu_seqlens (int32) and max_seqlen are for `flash_attn_varlen_func` over the rows laid one
    after the other; step and digest say what it is.
    """
    arrays = {name: torch.from_numpy(getattr(batch, name)) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    arrays["cu_seqlens"] = torch.from_numpy(batch.cu_seqlens)
    arrays["loss_weights"] = torch.from_numpy(batch.loss_weights)
    return arrays | {"max_seqlen": batch.max_seqlen, "step": batch.step, "digest": batch.digest}


def for_transformers(batch: Batch) -> dict[str, torch.Tensor]:
    """What a model of Hugging Face transformers takes: input_ids, labels and position_ids, int64.

    The models shift labels by themselves, inside a row: `labels[i]` is the label of token `i - 1`, and -100 where it has
    none. The label of a row's last token, which stands after the row, is left out. Their loss has one weight for all
    rows, so a batch of a source with a `loss_weight` is refused.
    """
    if (batch.loss_weights != 1).any():
        raise ValueError("a source has a loss_weight, which the loss of these models does not know: take `tensors`")
    tokens, positions = (torch.from_numpy(column).long() for column in (batch.tokens, batch.position_ids))
    labels = torch.empty_like(tokens)
    labels[:, 0], labels[:, 1:] = -100, torch.from_numpy(batch.labels)[:, :-1]
    # A place after a row's last token is the first of the next row, which has no label in any case.
    labels.view(-1)[_unlabeled(batch.loss_mask.reshape(-1)[:-1]) + 1] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def shifted_labels(batch: Batch, ignore_index: int = -100) -> torch.Tensor:
    """Labels for `torch.nn.functional.cross_entropy`, int64: the next token, and `ignore_index` where none counts."""
    labels = torch.from_numpy(batch.labels).long()
    labels.view(-1)[_unlabeled(batch.loss_mask.reshape(-1))] = ignore_index
    return labels


def _unlabeled(mask: np.ndarray) -> torch.Tensor:
    """Where no label counts: few places, so finding them costs less than a pass over all labels."""
    return torch.from_numpy(np.flatnonzero(mask == 0))


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins items of `for_transformers` along their rows: the `data_collator` of a Hugging Face `Trainer`."""
    return {key: torch.cat([item[key] for item in items]) for key in items[0]}


def _this_rank() -> tuple[int, int]:
    """The rank and world of `torch.distributed`, or of the environment that `torchrun` sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _loader(curriculum, rank, world, overrides) -> Loader:
    if isinstance(curriculum, Loader):
        if rank is not None or world is not None or overrides:
            raise TypeError("rank, world and overrides are given to Loader")
        return curriculum
    own_rank, own_world = _this_rank()
    own = (own_rank if rank is None else rank, own_world if world is None else world)
    return Loader(curriculum, *own, overrides=overrides)


class IterableDataset(torch.utils.data.IterableDataset):
    """This rank's batches from step `start` on, in the order of steps.

    With `unit="micro_batch"` an item is a micro-batch. Workers of a DataLoader take turns, so its order is that of one
    process. The state is a step: the one that comes next. It is the same for every number of ranks and workers;
    torchdata's StatefulDataLoader keeps it by itself. Within a step it also counts this rank's micro-batches, and then
    needs the same number of ranks. `threads` read ahead in this process, without the copies that a worker makes; workers
    of a DataLoader have none.
    """

    def __init__(
        self,
        curriculum: str | os.PathLike[str] | Plan | Loader,
        *,
        start: int = 1,
        stop: int | None = None,
        unit: str = "step",
        transform: Callable[[Batch], Any] = tensors,
        threads: int = 0,
        rank: int | None = None,
        world: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ):
        if unit not in UNITS:
            raise ValueError(f"unit is {unit!r}, wanted one of {UNITS}")
        self.loader = _loader(curriculum, rank, world, overrides)
        end = self.loader.steps + 1
        self.stop = end if stop is None else stop
        if not 1 <= start <= self.stop <= end:
            raise ValueError(f"steps {start} to {self.stop} (start, stop) are not within 1 to {end}")
        if not 0 <= threads <= THREADS_MAX:
            raise ValueError(f"threads is {threads}, wanted 0 to {THREADS_MAX}")
        self.unit, self.transform, self.threads = unit, transform, threads
        self._begin = self._next = (start, 0)

    def state_dict(self) -> dict[str, int]:
        """The place of the next item."""
        step, micro_batch = self._next
        return {"step": step} | ({"micro_batch": micro_batch, "world": self.loader.world} if micro_batch else {})

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where the state was taken."""
        step, micro_batch, world = state["step"], state.get("micro_batch", 0), state.get("world", self.loader.world)
        if micro_batch and (world, self.unit) != (self.loader.world, "micro_batch"):
            raise ValueError(
                f"the state is within step {step} of {world} ranks, by micro-batch: go on with these, or save between steps"
            )
        self._begin = self._next = (step, micro_batch)

    def _count(self, step: int) -> int:
        return 1 if self.unit == "step" else self.loader.micro_batch_count(step)

    def _after(self, place: tuple[int, int], items: int) -> tuple[int, int]:
        """The place so many items later."""
        step, index = place
        if self.unit == "step":
            return step + items, 0
        index += items
        while step < self.stop and index >= self._count(step):
            step, index = step + 1, index - self._count(step)
        return step, index

    def _ahead(self) -> Iterator[Any]:
        """The items of this process, read ahead by threads."""
        step, first = self._after(self._begin, 0)
        # Enough batches ahead for each thread to have one in work.
        depth = max(4, 2 * self.threads)
        for batch in self.loader.batches(step, max(step, self.stop), threads=self.threads, depth=depth):
            step = batch.step
            items = [batch] if self.unit == "step" else list(batch.micro_batches())
            del batch  # Its memory is that of the next one, as below.
            items = items[first:][::-1]
            while items:
                self._next = self._after((step, first), 1)
                item = self.transform(items.pop())
                yield item
                del item
                first += 1
            first = 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        if worker is None and self.threads:
            yield from self._ahead()
            return
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        turn = self._begin
        while True:
            # All workers count turns from the same place, so their states agree.
            step, index = self._after(turn, number)
            if step >= self.stop:
                return
            item = self.loader.batch(step) if self.unit == "step" else self.loader.micro_batch(step, index)
            self._next = turn = self._after(turn, workers)
            item = self.transform(item)
            yield item
            del item  # Its memory is that of the next batch.


class Dataset(torch.utils.data.Dataset):
    """A map-style dataset: item `i` is this rank's batch of step `i + 1`, or with `unit="sample"` sequence `i` of the run
    as a batch of one row (for a sampler that splits samples among ranks by itself)."""

    def __init__(
        self,
        curriculum: str | os.PathLike[str] | Plan | Loader,
        *,
        unit: str = "step",
        transform: Callable[[Batch], Any] = tensors,
        rank: int | None = None,
        world: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ):
        if unit not in ("step", "sample"):
            raise ValueError(f"unit is {unit!r}, wanted 'step' or 'sample'")
        self.loader = _loader(curriculum, rank, world, overrides)
        self.unit, self.transform = unit, transform

    def __len__(self) -> int:
        return self.loader.steps if self.unit == "step" else self.loader.plan.samples

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        index %= len(self)
        read = self.loader.sample(index) if self.unit == "sample" else self.loader.batch(index + 1)
        return self.transform(read)
