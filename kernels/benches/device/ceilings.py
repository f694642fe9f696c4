"""The ceilings of a GPU that other figures are shares of: bandwidth and product rates.

    python kernels/benches/device/ceilings.py

Copies and triads (a = b + 2 c) of 2 GiB, bytes read and written counted; products of 8192^3 in bf16 and f32 (TF32 off),
random data, each the median of events around several calls, over operands that no cache holds; clocks and power limit
under load. Needs PyTorch. Limits: one shape; the library's choice of kernel; a clock read once.
"""

import subprocess

import torch

from driver import attempt, say, seconds


def bandwidth():
    count = 1 << 29
    a, b, c = (torch.randn(count, device="cuda") for _ in range(3))
    say(what="copy", tb_per_s=round(8 * count / seconds(torch, [lambda: a.copy_(b)], 5, 5) / 1e12, 3))
    say(what="triad", tb_per_s=round(12 * count / seconds(torch, [lambda: torch.add(b, c, alpha=2.0, out=a)], 5, 5) / 1e12, 3))
    say(what="fill", tb_per_s=round(4 * count / seconds(torch, [lambda: a.fill_(1.0)], 5, 5) / 1e12, 3))


def products(dtype, side, each):
    a, b = (torch.randn(side, side, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * side**3 / seconds(torch, [lambda: torch.mm(a, b.t(), out=out), lambda: torch.mm(b, a.t(), out=out)], 5, each)
    say(what=f"product {str(dtype)[6:]} {side}^3", tflop_per_s=round(rate / 1e12, 1))


def clocks():
    query = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    for _ in range(200):
        a @ a
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    torch.cuda.synchronize()
    say(what=f"under load: {query}", found=done.stdout.strip())


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    say(what="device", name=torch.cuda.get_device_name(), torch=torch.__version__)
    attempt("bandwidth", bandwidth)
    torch.cuda.empty_cache()
    attempt("bf16", lambda: products(torch.bfloat16, 8192, 10))
    attempt("f32", lambda: products(torch.float32, 8192, 2))
    attempt("clocks", clocks)
