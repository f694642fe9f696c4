"""What asking for work costs the host, in microseconds a call: the driver from C, CUDA graphs, and PyTorch's operations.

    python kernels/benches/device/host.py [--cubins FOLDER]

`launch`: cuLaunchKernel of an empty kernel from a C loop; in bursts of 400 behind a wait (the queue of about 1,000 is never
full: the host's cost), and 10,000 at once (the device may be what limits); with no and with twelve arguments; by one
thread and by two, into one stream and into two. `graph`: replay of 2,000 empty nodes, asking and all of it. `torch`: a
call from Python in bursts of 50, tiny operands, so that the host is what is measured; Python's own part is about 1 us
of it, and tch's differs. Medians of repeats. Needs PyTorch, nvcc and a C compiler. Limit: an idle device: a busy one may
slow the driver down; two threads of PyTorch are not measured, as Python lets one run at a time.
"""

import argparse
import ctypes
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch

from driver import HERE, Kernel, attempt, check, cubin, library, module, say


def c_library():
    path = pathlib.Path(tempfile.mkdtemp()) / "launches.so"
    subprocess.run([os.environ.get("CC", "gcc"), "-O2", "-shared", "-fPIC", HERE / "launches.c", "-o", path, "-lpthread"], check=True, timeout=60)
    found = ctypes.CDLL(str(path))
    for name in ("launch_many", "record_many", "round_trips", "launch_by_two"):
        getattr(found, name).restype = ctypes.c_double
    return found


def launches(asked):
    cuda, c = library(), c_library()
    image = module(cuda, cubin("empty.cu", asked.cubins))
    address = lambda name: ctypes.cast(getattr(cuda, name), ctypes.c_void_p)
    launch, enter, wait, record = map(address, ("cuLaunchKernel", "cuCtxSetCurrent", "cuStreamSynchronize", "cuEventRecord"))
    context, event = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    check(cuda.cuEventCreate(ctypes.byref(event), 2), "cuEventCreate")
    streams = [torch.cuda.Stream() for _ in range(2)]
    one, two = (ctypes.c_void_p(stream.cuda_stream) for stream in streams)
    values = [ctypes.c_void_p(64)] * 8 + [ctypes.c_uint(1)] * 2 + [ctypes.c_float(1.0)] * 2
    params = (ctypes.c_void_p * 12)(*[ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values])

    def measured(what, count, repeats, work):
        times = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            took = work(count)
            torch.cuda.synchronize()
            if took < 0:
                raise RuntimeError(f"{what}: CUDA error {-took:.0f}")
            times.append((took / count * 1e6, (time.perf_counter() - begin) / count * 1e6))
        asking, whole = (statistics.median(column) for column in zip(*times[1:]))
        say(what="launch", how=what, us=round(asking, 2), us_until_done=round(whole, 2), count=count)

    for name in ("empty", "twelve"):
        function = Kernel(cuda, image, name, 32, 0).function
        measured(f"{name}, burst", 400, 25, lambda n: c.launch_many(launch, function, one, params, n))
        measured(f"{name}, 10,000", 10000, 3, lambda n: c.launch_many(launch, function, one, params, n))
        measured(f"{name}, default stream, burst", 400, 25, lambda n: c.launch_many(launch, function, None, params, n))
        measured(f"{name}, two threads, one stream, burst, each", 200, 25,
                 lambda n: c.launch_by_two(launch, enter, context, function, one, one, params, n))
        measured(f"{name}, two threads, two streams, burst, each", 400, 25,
                 lambda n: c.launch_by_two(launch, enter, context, function, one, two, params, n))
    measured("event record, burst", 200, 25, lambda n: c.record_many(record, event, one, n))
    measured("launch and wait", 200, 5, lambda n: c.round_trips(launch, wait, function, one, params, n))

    kernel, nodes = Kernel(cuda, image, "twelve", 32, 0), 2000
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code = c.launch_many(launch, kernel.function, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), params, nodes)
        check(int(-code) if code < 0 else 0, "capture")
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        asked_for = time.perf_counter()
        torch.cuda.synchronize()
        times.append((asked_for - begin, time.perf_counter() - begin))
    asking, whole = (statistics.median(column) for column in zip(*times[2:]))
    say(what="graph", nodes=nodes, us_to_ask=round(asking * 1e6, 1), us_a_node=round(whole / nodes * 1e6, 3), us_a_node_to_ask=round(asking / nodes * 1e6, 3))


def call(name, work, burst=50, repeats=20):
    def measure():
        for _ in range(20):
            work()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(burst):
                work()
            times.append((time.perf_counter() - begin) / burst * 1e6)
        say(what="torch", call=name, us=round(statistics.median(times), 2), least=round(min(times), 2), most=round(max(times), 2))
    attempt(name, measure)


def calls():
    make = lambda *size, dtype=torch.bfloat16: torch.randn(*size, device="cuda").to(dtype)
    small, square, out = make(1024, dtype=torch.float32), make(128, 128), make(128, 128)
    host = torch.zeros(1024, dtype=torch.int32).pin_memory()
    device = host.cuda()
    q, kv = make(1024, 8, 64), make(1024, 2, 64)
    ends = torch.arange(0, 1025, 128, device="cuda", dtype=torch.int32)
    rows, weights, offsets = make(1024, 256), make(16, 256, 256), torch.arange(64, 1025, 64, device="cuda", dtype=torch.int32)
    call("nothing (Python's loop)", lambda: None)
    call("empty 4 KB", lambda: torch.empty(1024, device="cuda"))
    call("add, new", lambda: small + small)
    call("add, in place", lambda: small.add_(1.0))
    call("copy f32 to bf16", lambda: small.to(torch.bfloat16))
    call("view and slice", lambda: small.view(32, 32)[1:])
    call("mm 128 bf16, new", lambda: square @ square)
    call("mm 128 bf16, into", lambda: torch.mm(square, square, out=out))
    call("bmm 16 x 128 f32", lambda f=make(16, 128, 128, dtype=torch.float32): torch.bmm(f, f))
    call("upload 4 KB from pinned memory", lambda: device.copy_(host, non_blocking=True))
    call("pin, copy and upload 4 KB", lambda: torch.zeros(1024, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True), 20, 10)
    flash = torch.ops.aten._flash_attention_forward
    with torch.no_grad():
        call("flash attention forward, 8 documents of 128", lambda: flash(q, kv, kv, ends, ends, 128, 128, 0.0, True, False))
        found = attempt("flash", lambda: flash(q, kv, kv, ends, ends, 128, 128, 0.0, True, False))
        if found:
            grad, backward = make(1024, 8, 64), torch.ops.aten._flash_attention_backward
            call("flash attention backward", lambda: backward(grad, q, kv, kv, found[0], found[1], ends, ends, 128, 128, 0.0, True, found[2], found[3]), 20)
            torch.use_deterministic_algorithms(True, warn_only=True)
            call("flash attention backward, deterministic",
                 lambda: backward(grad, q, kv, kv, found[0], found[1], ends, ends, 128, 128, 0.0, True, found[2], found[3]), 20)
            torch.use_deterministic_algorithms(False)
        call("_grouped_mm 16 experts", lambda: torch._grouped_mm(rows, weights, offs=offsets))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins", help="a folder for what nvcc makes, used again when it is there")
    asked = parser.parse_args()
    say(what="device", name=torch.cuda.get_device_name(), torch=torch.__version__, cores=os.cpu_count())
    torch.zeros(1, device="cuda")
    attempt("launches", lambda: launches(asked))
    attempt("calls", calls)
