"""A batch, or a run of its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import provenance
from .errors import Error

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Batch:
    """Rows of one step: a whole batch, a rank's part of one, or a micro-batch.

    Arrays are views of the memory that the loader filled, `[rows, seq_len]`. The memory is reused once the last of them
    is no longer referenced.
    """

    def __init__(self, batch, first: int = 0, last: int | None = None):
        self._batch = batch
        self._range = (first, len(batch.rows) if last is None else last)

    def __len__(self) -> int:
        """The number of rows."""
        return self._range[1] - self._range[0]

    def _column(self, name: str) -> np.ndarray:
        import numpy as np

        return np.asarray(self._batch.column(name))[slice(*self._range)]

    @property
    def step(self) -> int:
        return self._batch.step

    @property
    def phase(self) -> str:
        return self._batch.phase

    @property
    def seq_len(self) -> int:
        return self._batch.seq_len

    @property
    def rows(self) -> list[int]:
        """The number of each row in its step."""
        return self._batch.rows[slice(*self._range)]

    @property
    def samples(self) -> list[int]:
        """The global sample number of each row."""
        return [self._batch.first_sample + row for row in self.rows]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token ids, int32; 0 in padding."""
        return self._column("tokens")

    @cached_property
    def labels(self) -> np.ndarray:
        """The token after each, int32: do not shift again. 0 where `loss_mask` is 0."""
        return self._column("labels")

    @cached_property
    def loss_mask(self) -> np.ndarray:
        """1 where the label counts, uint8; 0 at a document's last token and in padding."""
        return self._column("loss_mask")

    @cached_property
    def position_ids(self) -> np.ndarray:
        """Positions, int32: from 0 at the begin of every document."""
        return self._column("positions")

    @cached_property
    def label_count(self) -> int:
        """Labels that count: what a mean loss is divided by."""
        return int(self.loss_mask.sum(dtype="int64"))

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row are multiplied by, float32: `loss_weight` of its source. Divide by `label_count`."""
        import numpy as np

        return np.asarray(self._batch.loss_weights, dtype="float32")[slice(*self._range)]

    @cached_property
    def _cu_seqlens(self):
        import numpy as np

        starts, longest = self._batch.cu_seqlens(self._range)
        return np.asarray(starts), longest

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Where documents begin in the rows, laid one after the other, and the end: int32, as FlashAttention wants it."""
        return self._cu_seqlens[0]

    @property
    def max_seqlen(self) -> int:
        """The longest run between two of `cu_seqlens`."""
        return self._cu_seqlens[1]

    @property
    def digest(self) -> str:
        """The digest of these rows; of a whole step, what `zdata digest` prints."""
        return self._batch.digest(self._range)

    @property
    def sequence_digests(self) -> list[str]:
        """The digest of each row. `step_digest` of all ranks' lists, joined in the order of ranks, is the step's."""
        return self._batch.sequence_digests[slice(*self._range)]

    def micro_batches(self) -> Iterator[Batch]:
        """The rows by micro-batch, as views."""
        size = self._batch.micro_batch
        for first in range(*self._range, size):
            yield Batch(self._batch, first, min(first + size, self._range[1]))

    def where(self, row: int, text: bool = False) -> list[provenance.DocumentPart]:
        """The documents of a row in reading order: file, row and bytes, with their text if it is wanted."""
        first = self._range[0] + range(len(self))[row]
        (answer,) = json.loads(self._batch.documents((first, first + 1), text))
        return [provenance.part(document) for document in answer]

    def source(self, row: int) -> str:
        """The source of a row."""
        return self._batch.sample(self._range[0] + range(len(self))[row])[0]

    def torch(self) -> dict[str, Tensor | int | str]:
        """The arrays as tensors, which share their memory: tokens, labels, loss_mask, position_ids, cu_seqlens."""
        from .torch import tensors

        return tensors(self)

    def for_transformers(self) -> dict[str, Tensor]:
        """What a model of Hugging Face transformers takes; see `zdata.torch.for_transformers`."""
        from .torch import for_transformers

        return for_transformers(self)

    def __reduce__(self) -> Any:
        raise TypeError("a batch is not sent to another process: send its arrays or its step")

    def __repr__(self) -> str:
        try:
            digest = self.digest
        except Error:  # The batch of a parent process.
            digest = "unknown"
        return f"Batch(step={self.step}, phase={self.phase!r}, shape=({len(self)}, {self.seq_len}), digest={digest})"
