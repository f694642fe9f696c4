"""Machines of their own for tests/network.rs: network namespaces, joined by a network whose faults are chosen.

    network.py PREFIX COUNT     needs root, `ip` and /dev/net/tun; prints `ready`, or `none: WHY`

Machine i is the namespace PREFIX-i with the address 10.77.0.(i + 1) on the device PREFIXi. Every packet between machines
passes through this process, which does to it what the last words on its standard input said, each followed by a number:
`loss` (of a thousand packets), `delay` and `jitter` (milliseconds; jitter reorders), `cut` (a machine that hears and says
nothing more; -1: none). It answers each line with `done`. The machines go when its input ends.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def machine(prefix, number):
    """Makes machine `number`; returns the handle through which its packets come and go."""
    name, device = f"{prefix}-{number}", f"{prefix}{number}"
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    ip("netns", "add", name)
    ip("link", "set", device, "netns", name)
    ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", device)
    ip("-n", name, "link", "set", device, "up")
    ip("-n", name, "link", "set", "lo", "up")
    return handle


def forward(handles):
    """Carries packets until the input ends."""
    faults = {"loss": 0, "delay": 0, "jitter": 0, "cut": -1}
    lots = random.Random(5)
    waiting, count, rest = [], 0, ""
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for handle in select.select([0, *handles], [], [], pause)[0]:
            if handle == 0:
                read = os.read(0, 4096).decode()
                if not read:
                    return
                *lines, rest = (rest + read).split("\n")
                for line in lines:
                    words = line.split()
                    faults.update(zip(words[::2], map(int, words[1::2])))
                    print("done", flush=True)
                continue
            packet = os.read(handle, 65536)
            # Version 4 alone: neighbours are not asked for on such a device.
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if not 0 <= target < len(handles) or faults["cut"] in (target, handles.index(handle)):
                continue
            if lots.randrange(1000) < faults["loss"]:
                continue
            count += 1
            late = (faults["delay"] + lots.random() * faults["jitter"]) / 1000
            heapq.heappush(waiting, (time.monotonic() + late, count, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(handles[target], packet)
            except OSError:
                pass  # A full queue loses packets, as everywhere.


def main():
    prefix, count = sys.argv[1], int(sys.argv[2])
    names = [f"{prefix}-{number}" for number in range(count)]
    try:
        try:
            handles = [machine(prefix, number) for number in range(count)]
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or b""
            print(f"none: {error} {said.decode().strip()}", flush=True)
            return
        print("ready", flush=True)
        forward(handles)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


main()
