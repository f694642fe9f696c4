"""The nearest peer's way of making a batch, for comparison: rows gathered from a memory-mapped file of tokens by numpy,
in a shuffled order, with labels, positions and mask, as Megatron-LM's GPT dataset does it. No digest, no check of what
was read, no document boundaries. Run beside `cargo bench -p loader`; needs numpy.
"""

import os
import tempfile
import time

import numpy as np

SEQ_LEN, ROWS, TOKENS = 4096, 256, 64 << 20

folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
with tempfile.NamedTemporaryFile(dir=folder) as file:
    np.random.default_rng(1).integers(0, 65536, TOKENS, dtype=np.uint16).tofile(file.name)
    data = np.memmap(file.name, dtype=np.uint16, mode="r")
    order = np.random.default_rng(2).permutation((TOKENS - 1) // SEQ_LEN)
    steps = len(order) // ROWS

    def batch(step):
        rows = []
        for sample in order[step * ROWS : (step + 1) * ROWS]:
            text = data[sample * SEQ_LEN : sample * SEQ_LEN + SEQ_LEN + 1].astype(np.int64)
            rows.append((text[:-1], text[1:], np.ones(SEQ_LEN, np.float32), np.arange(SEQ_LEN, dtype=np.int64)))
        return [np.stack(column) for column in zip(*rows)]

    best = float("inf")
    for turn in range(4):
        begin = time.thread_time()
        for step in range(steps):
            batch(step)
        if turn:  # The first turn warms the page cache.
            best = min(best, time.thread_time() - begin)
    print(f"numpy memmap gather, warm, 1 thread: {steps * ROWS * SEQ_LEN / best / 1e6:.1f} M tokens/s on the core")
