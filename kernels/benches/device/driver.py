"""What the scripts beside this share: CUDA's driver by ctypes, kernels compiled by nvcc, times by events, JSON lines."""

import ctypes
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

START = time.perf_counter()
HERE = pathlib.Path(__file__).resolve().parent
MAX_DYNAMIC_SHARED, PREFERRED_CARVEOUT = 8, 9                                # CU_FUNC_ATTRIBUTE_*
BFLOAT16, SWIZZLE_128B, PROMOTION_256B = 9, 3, 3                             # of cuTensorMapEncodeTiled


def say(**fact):
    print(json.dumps({**fact, "at": round(time.perf_counter() - START, 1)}), flush=True)


def attempt(what, work):
    """`work()`, or a line that says why it could not be done."""
    try:
        return work()
    except Exception as fault:
        say(what=what, failed=f"{type(fault).__name__}: {str(fault).strip()[:300]}")
        return None


def library():
    return ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")


def cubin(source, folder=None):
    """The machine code of `source` for sm_90a: from `folder`, if it was compiled before, else by nvcc."""
    path = pathlib.Path(folder or tempfile.mkdtemp()) / (pathlib.Path(source).stem + ".cubin")
    if not path.exists():
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        made = path.with_suffix(f".{time.monotonic_ns()}")
        words = [nvcc, "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", HERE / source, "-o", made]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        made.rename(path)
    return path.read_bytes()


class Kernel:
    """A function of a module; `args` of a launch are ctypes values in the kernel's order."""
    def __init__(self, cuda, module, name, threads, shared):
        self.cuda, self.threads, self.shared, self.function = cuda, threads, shared, ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()), name)
        if shared > 48 << 10:
            check(cuda.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, shared), f"{name}: {shared} bytes of shared memory")
            check(cuda.cuFuncSetAttribute(self.function, PREFERRED_CARVEOUT, 100), f"{name}: carve-out")

    def launch(self, grid, args, stream=0):
        pointers = (ctypes.c_void_p * len(args))(*[ctypes.cast(ctypes.byref(arg), ctypes.c_void_p) for arg in args])
        check(self.cuda.cuLaunchKernel(self.function, grid, 1, 1, self.threads, 1, 1, self.shared, ctypes.c_void_p(stream), pointers, None),
              "cuLaunchKernel")


def module(cuda, image):
    found = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(found), image), "cuModuleLoadData")
    return found


class TensorMap(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


def tensor_map(cuda, tensor, box):
    """A map of a bf16 matrix [rows, columns] for TMA, in boxes of (columns, rows), each row of 128 bytes, swizzled."""
    rows, columns = tensor.shape
    room = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(room) + 63) // 64 * 64
    two = ctypes.c_uint32 * 2
    code = cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), BFLOAT16, 2, ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * 2), two(*box), two(1, 1), 0, SWIZZLE_128B, PROMOTION_256B, 0)
    check(code, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


def seconds(torch, works, rounds=7, each=10):
    """Median seconds of a call on the device. `works` are calls on different data, so that no cache holds them all."""
    for work in works:
        work()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for index in range(each):
            works[index % len(works)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / each)
    return statistics.median(times)
