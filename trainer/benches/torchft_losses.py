"""Seconds from the loss of a rank to the next step of the others, with torchft: beside `tests/losses.py`, which measures ours.

    python trainer/benches/torchft_losses.py [--kills 10] [--ranks 3] [--pause 1.0]

Needs torchft (`pip install torch==2.11.0 torchft-nightly numpy`), which nothing else here does. Each rank is a replica group of its own,
on the CPU, with Gloo, a small model and AdamW, as torchft's own example trains: a lighthouse, `Manager`, `DistributedDataParallel`
and `OptimizerWrapper`, timeouts as given. One rank is killed by SIGKILL at a time; the seconds run until the others have committed
a step among themselves. Then it is started again, and the next one is killed once all have made steps together.
"""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

WIDTH, ROWS = 64, 16


def rank(number, seconds, log):
    """Trains until it is ended, and writes a line for each step that it commits."""
    import torch
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
    manager = None

    def state_dict():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    patience = timedelta(seconds=seconds)
    # What torchrun would serve for each replica group.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, hostname="127.0.0.1",
        pg=ProcessGroupGloo(timeout=patience), min_replica_size=1, load_state_dict=load_state_dict,
        state_dict=state_dict, replica_id=f"rank_{number}", timeout=patience,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(wrapped.parameters()))
    with open(log, "a", buffering=1) as out:
        while True:
            rows = torch.randn(ROWS, WIDTH)
            optimizer.zero_grad()
            loss = (wrapped(rows) - rows).square().mean()
            loss.backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                step = {"time": time.time(), "rank": number, "step": before, "ranks": manager.num_participants()}
                out.write(json.dumps(step) + "\n")


def start(folder, number, seconds, lighthouse):
    words = [sys.executable, __file__, "--rank", str(number), "--timeout", str(seconds), "--log", str(folder / f"{number}.jsonl")]
    own = {"TORCHFT_LIGHTHOUSE": lighthouse}
    log = open(folder / f"{number}.log", "ab")
    return subprocess.Popen(words, env={**os.environ, **own}, stdout=log, stderr=log)


def newest(path, most=20_000):
    """The last lines of a file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read().decode().splitlines()[1:]
    except FileNotFoundError:
        return []


def until(folder, ranks, count, since, patience=120):
    """When a step by so many ranks was first committed after `since`; `None` where none is."""
    end = time.time() + patience
    while time.time() < end:
        for number in range(ranks):
            for line in newest(folder / f"{number}.jsonl"):
                step = json.loads(line) if line.endswith("}") else {"ranks": -1}
                if step["ranks"] == count and step["time"] > since:
                    return step["time"]
        time.sleep(0.005)
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds after which torchft gives up an exchange")
    parser.add_argument("--heartbeat", type=int, default=5000, help="ms after which the lighthouse takes a rank for lost")
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--log")
    args = parser.parse_args()
    if args.rank is not None:
        return rank(args.rank, args.timeout, args.log)
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20,
                                  heartbeat_timeout_ms=args.heartbeat)
    folder, draw, found = Path(tempfile.mkdtemp()), random.Random(1), []
    ranks = [start(folder, number, args.timeout, lighthouse.address()) for number in range(args.ranks)]
    try:
        for _ in range(args.kills):
            if until(folder, args.ranks, args.ranks, time.time()) is None:
                sys.exit(f"the ranks do not come together: see {folder}")
            time.sleep(args.pause * draw.random())
            victim, at = draw.randrange(args.ranks), time.time()
            ranks[victim].send_signal(signal.SIGKILL)
            ranks[victim].wait()
            then = until(folder, args.ranks, args.ranks - 1, at)
            if then is None:
                sys.exit(f"no step without rank {victim}: see {folder}")
            found.append(then - at)
            print(f"rank {victim}: {then - at:.2f} s", flush=True)
            (folder / f"{victim}.jsonl").unlink()
            ranks[victim] = start(folder, victim, args.timeout, lighthouse.address())
    finally:
        for process in ranks:
            process.kill()
        lighthouse.shutdown()
    print(f"{len(found)} kills of {args.ranks} ranks: median {statistics.median(found):.2f} s, longest {max(found):.2f} s")


main()
