"""Products of experts' rows at the shapes of zaya1-1b, for 8,192 and 32,768 tokens: libraries and prototypes.

    python kernels/benches/device/grouped.py [--cubins FOLDER] [--only library|mma|wgmma|wgmma_pair] [--seconds 60]

Ways: torch._grouped_mm; a loop of cuBLAS calls that knows the counts (in a CUDA graph, so without the host's time); one
cuBLAS batch over experts of equal size (`padded`, what no ragged kernel is expected to pass); grouped_mma.cu (mma.sync);
grouped_wgmma.cu (wgmma). Tokens are dealt to 17 classes at random, the last is the skip. A line for each shape and way:
microseconds, TFLOP/s of the rows that exist. Prototypes are checked against f64 first, for rows that nothing may write,
for equal bits of 50 runs, and for an expert's bits when it is alone. Each family runs in a process of its own, so that a
fault of one does not end the others. Needs PyTorch, nvcc (or FOLDER with what it made) and an sm_90 GPU. Limits: even
routing only; products alone, without gathering rows, activation or gradient sums.
"""

import argparse
import ctypes
import subprocess
import sys

from driver import HERE, Kernel, TensorMap, attempt, cubin, library, module, say, seconds, tensor_map

E, D, I = 16, 1024, 768
# Name, way, K and N (of weights: M and N): rows [n, K] by weights [E, N, K], by [E, K, N], or rows by rows.
SHAPES = [("up", "rows", D, 2 * I), ("down", "rows", I, D), ("down back", "back", D, I), ("up back", "back", 2 * I, D),
          ("up weights", "weights", 2 * I, D), ("down weights", "weights", D, I)]
FAMILIES = ("library", "mma", "wgmma", "wgmma_pair")
MMA = {"rows": ["mma_0_128_128_128_3_2", "mma_0_128_256_256_4_1", "mma_0_128_128_256_3_2"],
       "back": ["mma_1_128_128_128_3_2", "mma_1_128_256_256_4_1"], "weights": ["mma_2_128_128_128_3_2", "mma_2_128_256_256_4_1"]}
WGMMA = {"wgmma": {"rows": ["wgmma_rows"], "back": ["wgmma_back"], "weights": ["wgmma_weights"]},
         "wgmma_pair": {"rows": ["wgmma_rows_pair_1", "wgmma_rows_pair_2"], "back": ["wgmma_back_pair_2"], "weights": []}}
WGMMA_SHARED = 4 * (128 + 256) * 128 + 1024 + 128


class MmaArgs(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("a", "b", "out", "ends", "order")] + [(n, ctypes.c_int) for n in ("experts", "m", "n", "k")]


class WgmmaArgs(ctypes.Structure):
    _fields_ = [("ends", ctypes.c_void_p), ("out", ctypes.c_void_p)] + [(n, ctypes.c_int) for n in ("experts", "m", "n", "k")]


class Case:
    """A shape with its data: two sets, so that the second level cache does not hold what comes next."""
    def __init__(self, torch, tokens, shape, counts):
        self.torch, (self.name, self.way, self.k, self.n), self.tokens = torch, shape, tokens
        self.counts = counts
        self.ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        self.rows = sum(counts)
        self.flop = 2.0 * self.rows * self.k * self.n
        make = lambda *size: torch.randn(*size, device="cuda").bfloat16()
        second = {"rows": (E, self.n, self.k), "back": (E, self.k, self.n), "weights": (tokens, self.n)}[self.way]
        self.sets = [(make(tokens, self.k), make(*second)) for _ in range(2)]

    def out(self):
        shape, dtype = ((E, self.k, self.n), self.torch.float32) if self.way == "weights" else ((self.tokens, self.n), self.torch.bfloat16)
        return self.torch.full(shape, float("nan"), device="cuda", dtype=dtype)

    def exact(self, a, b):
        out, start = self.out().double(), 0
        for e, count in enumerate(self.counts):
            rows = slice(start, start + count)
            if self.way == "weights":
                out[e] = a[rows].double().t() @ b[rows].double()
            else:
                out[rows] = a[rows].double() @ (b[e].double().t() if self.way == "rows" else b[e].double())
            start += count
        return out

    def report(self, by, work, **more):
        took = seconds(self.torch, [lambda pair=pair: work(*pair) for pair in self.sets])
        say(what="grouped", tokens=self.tokens, shape=self.name, by=by, us=round(took * 1e6, 1), tflop_per_s=round(self.flop / took / 1e12, 1), **more)


def libraries(case):
    torch, ends = case.torch, case.ends

    def grouped(a, b):
        if case.way == "weights":
            return torch._grouped_mm(a[:case.rows].t(), b[:case.rows], offs=ends)
        return torch._grouped_mm(a, b.transpose(-2, -1) if case.way == "rows" else b, offs=ends)
    attempt("torch._grouped_mm", lambda: case.report("torch._grouped_mm", grouped))

    def loop(a, b):
        start = 0
        for e, count in enumerate(case.counts):
            rows = slice(start, start + count)
            if case.way == "weights":
                torch.mm(a[rows].t(), b[rows], out=into[e])
            else:
                torch.mm(a[rows], b[e].t() if case.way == "rows" else b[e], out=into[rows])
            start += count
    into = case.out().bfloat16()

    def looped():
        graphs = {}
        for pair in case.sets:
            loop(*pair)
            torch.cuda.synchronize()
            graphs[id(pair[0])] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[id(pair[0])]):
                loop(*pair)
        case.report("cuBLAS loop", lambda a, b: graphs[id(a)].replay())
    attempt("cuBLAS loop", looped)

    def padded(a, b):
        each = case.tokens // E
        x = a.view(E, each, case.k)
        if case.way == "weights":
            return torch.bmm(x.transpose(1, 2), b.view(E, each, case.n))
        return torch.bmm(x, b.transpose(1, 2) if case.way == "rows" else b)

    def evenly():
        took = seconds(torch, [lambda pair=pair: padded(*pair) for pair in case.sets])
        say(what="grouped", tokens=case.tokens, shape=case.name, by="cuBLAS padded", us=round(took * 1e6, 1),
            tflop_per_s=round(2.0 * case.tokens * case.k * case.n / took / 1e12, 1))
    attempt("cuBLAS padded", evenly)


def prove(case, by, work):
    """Equal to f64 within rounding; nothing else written; equal bits of 50 runs. `work` writes into what it is given."""
    torch, (a, b) = case.torch, case.sets[0]
    out = case.out()
    work(a, b, out)
    torch.cuda.synchronize()
    exact = case.exact(a, b)
    written = out if case.way == "weights" else out[:case.rows]
    truth = exact if case.way == "weights" else exact[:case.rows]
    error = ((written.double() - truth).norm() / truth.norm()).item()
    untouched = case.way == "weights" or bool(torch.isnan(out[case.rows:]).all())
    again, differ = case.out(), torch.zeros((), dtype=torch.int64, device="cuda")
    kind = torch.int32 if case.way == "weights" else torch.int16
    for _ in range(50):
        again.fill_(float("nan"))
        work(a, b, again)
        differ += (again.view(kind) != out.view(kind)).any()
    good = error < (1e-4 if case.way == "weights" else 4e-3) and untouched and differ.item() == 0
    say(what="proof", tokens=case.tokens, shape=case.name, by=by, right=good, error=error, untouched=untouched, runs_that_differ=differ.item())
    return out if good else None


def alone(case, by, out, work):
    """An expert whose rows lie elsewhere and who has no neighbours leaves the same bits."""
    torch, (a, b), e = case.torch, case.sets[0], E // 3
    start = sum(case.counts[:e])
    rows = slice(start, start + case.counts[e])
    one = torch.full_like(out[e:e + 1] if case.way == "weights" else out[rows], float("nan"))
    work(a[rows].contiguous(), b[rows].contiguous() if case.way == "weights" else b[e:e + 1].contiguous(), one, case.counts[e:e + 1])
    expected = out[e:e + 1] if case.way == "weights" else out[rows]
    say(what="proof", tokens=case.tokens, shape=case.name, by=by, expert_alone_has_equal_bits=bool(torch.equal(one, expected)))


def prototypes(case, names, launcher):
    torch = case.torch
    for name in names:
        def one(name=name):
            launch = launcher(name)
            ends = lambda counts: torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
            work = lambda a, b, into: launch(case, a, b, into, case.ends, E)
            out = prove(case, name, work)
            if out is not None:
                attempt(f"{name} alone", lambda: alone(case, name, out, lambda a, b, into, counts: launch(case, a, b, into, ends(counts), 1)))
            into = case.out()
            case.report(name, lambda a, b: work(a, b, into), right=out is not None)
        attempt(f"{name} {case.name}", one)
        torch.cuda.synchronize()      # a fault of the device ends the family here


def family(asked):
    import torch
    torch.cuda.init()
    torch.manual_seed(1)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    stream = lambda: torch.cuda.current_stream().cuda_stream
    if asked.only != "library":
        torch.zeros(1, device="cuda")                                        # so that there is a context
        cuda = library()
        code = module(cuda, cubin("grouped_mma.cu" if asked.only == "mma" else "grouped_wgmma.cu", asked.cubins))

    def mma(name):
        _, mode, bm, bn, threads, stages, blocks = name.split("_")
        kernel = Kernel(cuda, code, name, int(threads), int(stages) * (int(bm) + int(bn)) * 128)

        def launch(case, a, b, out, ends, experts):
            args = MmaArgs(a.data_ptr(), b.data_ptr(), out.data_ptr(), ends.data_ptr(), None, experts, case.k, case.n, case.k)
            kernel.launch(multiprocessors * int(blocks), [args], stream())
        return launch

    def wgmma(name):
        kernel, maps = Kernel(cuda, code, name, 384, WGMMA_SHARED), {}

        def launch(case, a, b, out, ends, experts):
            key = a.data_ptr(), b.data_ptr(), a.shape
            if key not in maps:
                back = "back" in name
                heights = (64, 64) if "weights" in name else (64 if "pair_1" in name else 128, 64 if back else 128 if "pair_2" in name else 256)
                maps[key] = tensor_map(cuda, a, (64, heights[0])), tensor_map(cuda, b.reshape(-1, b.shape[-1]), (64, heights[1]))
            args = WgmmaArgs(ends.data_ptr(), out.data_ptr(), experts, case.k, case.n, case.k)
            kernel.launch(multiprocessors // 2 * 2, [*maps[key], args], stream())
        return launch

    for tokens in asked.tokens:
        counts = torch.bincount(torch.randint(0, E + 1, (tokens,)), minlength=E + 1)[:E].tolist()
        for shape in SHAPES:
            case = Case(torch, tokens, shape, counts)
            if asked.only == "library":
                libraries(case)
            elif asked.only == "mma":
                prototypes(case, MMA[case.way], mma)
            else:
                wide = lambda name: 512 if "pair_1" in name else 256
                prototypes(case, [name for name in WGMMA[asked.only][case.way] if case.n % wide(name) == 0], wgmma)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins", help="a folder for what nvcc makes, used again when it is there")
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[8192, 32768])
    parser.add_argument("--seconds", type=float, default=60, help="for each family")
    asked = parser.parse_args()
    if asked.only:
        return family(asked)
    for only in FAMILIES:
        words = [sys.executable, HERE / "grouped.py", "--only", only, "--tokens", ",".join(map(str, asked.tokens))]
        try:
            done = subprocess.run(words + (["--cubins", asked.cubins] if asked.cubins else []), timeout=asked.seconds)
            say(what="family", name=only, ended=done.returncode)
        except subprocess.TimeoutExpired:
            say(what="family", name=only, ended=f"more than {asked.seconds:.0f} s")


if __name__ == "__main__":
    main()
