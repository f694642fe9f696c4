#!/usr/bin/env python3
"""What the kernels take on GPUs that are not here, by the compilers' own reports.

    resources.py            compiles for gfx942 (clang) and sm_90a (NVRTC), holds each kernel against the limits beside it
    resources.py --write    the same, and puts the table into kernels/docs/resources.md
    resources.py --install  first gets what is missing: clang-19 by apt where this user may, NVRTC's wheel into its own folder

Exit code 1: a limit is passed, a register spilled, arithmetic may be rearranged or is not exact. A compiler that is not here is left out,
which is said; 77 where none is here. Nothing is run: this shows what a kernel takes, not how fast it is.
"""

import concurrent.futures
import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/resources.md"
TAPES = HERE.parent / "src/device/emulated"
WHEELS = pathlib.Path(tempfile.gettempdir()) / "ztrain-nvrtc"
NVRTC = "nvidia-cuda-nvrtc==13.0.88"
CLANG = ["clang-19", "clang-20", "clang-21", "clang"]
HIP = ["-x", "hip", "--offload-arch=gfx942", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"]
LANGUAGE = ["-O3", "-std=c++17", "-ffp-contract=off", "-Wno-pragma-once-outside-header"]
# Flags by which LLVM may round otherwise than the text says.
RELAXED = re.compile(r"= (?:f\w+|tail call|call) (?:[a-z]+ )*?\b(fast|reassoc|contract|arcp|afn|nnan|ninf|nsz)\b")
# Loads of 16 bytes from memory, in PTX and in code for gfx942.
AT_ONCE = [re.compile(r"^\s*(?:@\S+\s+)?ld\.global(?:\.\w+)*\.v(?:4\.\w32|2\.\w64)\b", re.M),
           re.compile(r"^\s*global_load_dwordx4\b", re.M)]
# Products by matrix units, in the same.
BY_MATRIX_UNITS = [re.compile(r"^\s*mma\.sync\.aligned\.m16n8k16\b", re.M), re.compile(r"^\s*v_mfma_f32_16x16x16_bf16\b", re.M)]
# Instructions of PTX that round otherwise than IEEE 754 does: denormal numbers flushed, approximations, division within 2 units.
INEXACT = re.compile(r"^.*\b\w+(?:\.\w+)*\.(?:ftz|approx|full)\b.*$", re.M)
# Registers on sm_90a: at most those of the limit beside a kernel, which are gfx942's, but for these, whose sums lie in more.
SM_90A = {"attention_f32": 128, "attention_queries_f32": 128, "attention_keys_f32": 184, "attention_keys_64_bf16": 192,
          "grouped_bf16": 128, "grouped_input_bf16": 128,
          "grouped_swiglu_bf16": 128, "grouped_swiglu_backward_bf16": 128, "grouped_weights_bf16": 128,
          "update_chunks": 80}
FLAGS = [b"--std=c++17", b"--fmad=false"]


def declared():
    """Threads and limits of each kernel, from the sources; and how many loads of 16 bytes and products by matrix units its code must
    have, where that is said."""
    found = {}
    for path in sorted(HERE.glob("*.h")):
        limits = r"^KERNEL\((\w+), (\d+), LIMIT\((\d+), (\d+), (\d+)(?:, (\d+))?(?:, (\d+))?(?:, \d+)?\)"
        for name, *numbers in re.findall(limits, path.read_text(), re.M):
            whats = ("threads", "registers", "shared", "waves", "at_once", "products")
            found[name] = dict(zip(whats, (int(number or 0) for number in numbers)))
    return found


def install():
    if not any(map(shutil.which, CLANG)):
        packages = ["clang-19", "lld-19"]
        done = subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *packages], capture_output=True, text=True)
        if done.returncode:
            print(f"clang-19 could not be installed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    if not WHEELS.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", WHEELS, NVRTC]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{NVRTC} could not be installed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)


def counted(own, which, code):
    own["at_once"], own["products"] = (len(one[which].findall(code)) for one in (AT_ONCE, BY_MATRIX_UNITS))


def gfx942():
    """What clang reports for each kernel, and the lines of its code that may be rearranged; nothing where there is no clang."""
    clang = next(filter(shutil.which, CLANG), None)
    if clang is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        report = ["-Rpass-analysis=kernel-resource-usage", "-S", "-o", f"{folder}/code"]
        command = [clang, *HIP, *LANGUAGE, *report, HERE / "kernels.h"]
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.returncode:
            sys.exit(out.stderr)
        # Such flags come from the source and from options: later passes add none.
        as_written = ["-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "-o", f"{folder}/text"]
        command = [clang, *HIP, *LANGUAGE, *as_written, HERE / "kernels.h"]
        subprocess.run(command, check=True, capture_output=True)
        code = pathlib.Path(folder, "code").read_text()
        relaxed = [line.strip() for line in pathlib.Path(folder, "text").read_text().splitlines() if RELAXED.search(line)]
    kernels, own = {}, None
    for line in out.stderr.splitlines():
        if name := re.search(r"Function Name: (\w+)", line):
            own = kernels.setdefault(name[1], {})
        elif number := re.search(r"remark:\s+(.+?): (\d+) \[", line):
            own[number[1]] = int(number[2])
    for name, body in re.findall(r"^(\w+):.*?@\1$(.*?)^\s*s_endpgm$", code, re.M | re.S):
        counted(kernels.setdefault(name, {}), 1, body)
    return kernels, relaxed


def compiled(nvrtc, flags):
    """A program of NVRTC that has been compiled, and what the compiler said."""
    headers = [path for path in sorted(HERE.glob("*.h"))]
    array = ctypes.c_char_p * len(headers)
    texts, names = array(*(path.read_bytes() for path in headers)), array(*(path.name.encode() for path in headers))
    program = ctypes.c_void_p()
    source = b'#include "kernels.h"\n'
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels", len(headers), texts, names):
        sys.exit("NVRTC took no program")
    flags = FLAGS + flags
    code = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    text = taken(nvrtc, program, "ProgramLog")
    if code:
        sys.exit(text)
    return program, text


def taken(nvrtc, program, what):
    """A text that a program holds."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def sm_90a():
    """Registers, spilled bytes and shared bytes of each kernel by NVRTC, and its instructions that are not exact; nothing where
    it is not here."""
    library = next(WHEELS.glob("**/libnvrtc.so.*"), None)
    if library is None:
        return None
    # Its own helper is looked for by name.
    for helper in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    program, text = compiled(nvrtc, [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v"])
    code = taken(nvrtc, program, "PTX")
    if ".entry" not in code:
        sys.exit("NVRTC gives no PTX")
    inexact = [line.strip() for line in INEXACT.findall(code)]
    kernels, own = {}, None
    for line in text.splitlines():
        if name := re.search(r"Compiling entry function '(\w+)'", line):
            own = kernels.setdefault(name[1], {"shared": 0})
        if spilled := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            own["spilled"] = int(spilled[1]) + int(spilled[2])
        if registers := re.search(r"Used (\d+) registers", line):
            own["registers"] = int(registers[1])
        if shared := re.search(r"(\d+) bytes smem", line):
            own["shared"] = int(shared[1])
    for name, body in re.findall(r"\.entry (\w+)\((.*?)^}$", code, re.M | re.S):
        counted(kernels[name], 0, body)
    return kernels, inexact


def missing(where, name, own, limit):
    """What a kernel has less of than its limits say."""
    whats = {"at_once": "loads of 16 bytes", "products": "products by matrix units"}
    return [f"{name}: {own[what]} {text} on {where}, at least {limit[what]}" for what, text in whats.items() if own[what] < limit[what]]


def offences(limits, amd, nvidia):
    """What does not keep to its limits, a sentence each."""
    found = []
    if amd is not None:
        found += [f"arithmetic that may be rearranged: {line}" for line in amd[1]]
        for name, limit in limits.items():
            own = amd[0].get(name)
            if own is None:
                found.append(f"{name} is not in the code for gfx942")
                continue
            taken = {"registers": own["VGPRs"] + own["AGPRs"], "shared": own["LDS Size [bytes/block]"]}
            beyond = [what for what in taken if taken[what] > limit[what]]
            found += [f"{name}: {taken[what]} {what} on gfx942, at most {limit[what]}" for what in beyond]
            if own["Occupancy [waves/SIMD]"] < limit["waves"]:
                found.append(f"{name}: {own['Occupancy [waves/SIMD]']} waves on gfx942, at least {limit['waves']}")
            if own["VGPRs Spill"] or own["SGPRs Spill"] or own["ScratchSize [bytes/lane]"]:
                found.append(f"{name} spills on gfx942")
            found += missing("gfx942", name, own, limit)
    if nvidia is not None:
        found += [f"arithmetic that is not exact on sm_90a: {line}" for line in nvidia[1]]
        for name, limit in limits.items():
            own = nvidia[0].get(name)
            if own is None:
                found.append(f"{name} is not in the code for sm_90a")
                continue
            most = {"registers": SM_90A.get(name, limit["registers"]), "shared": limit["shared"]}
            beyond = [what for what in most if own[what] > most[what]]
            found += [f"{name}: {own[what]} {what} on sm_90a, at most {most[what]}" for what in beyond]
            if own.get("spilled"):
                found.append(f"{name} spills on sm_90a")
            found += missing("sm_90a", name, own, limit)
    return found


def warps(registers, shared, threads):
    """Of the 64 that a multiprocessor of sm_90a holds, how many have room there: 65,536 registers, handed out to a warp by 256, and
    227 KiB of shared memory, of which a block takes 1 KiB besides its own (CUDA C++ Programming Guide, compute capability 9.0)."""
    a_block = threads // 32
    by_registers = 65536 // (a_block * 32 * (-(-registers // 8) * 8))
    by_memory = (227 << 10) // (shared + 1024)
    return a_block * min(64 // a_block, 32, by_registers, by_memory)


def played():
    """By kernel, which file of tapes plays it: on the emulator in three orders, under both sanitizers, and by digest on a GPU."""
    files = [path for path in TAPES.glob("*.rs") if path.stem not in ("build", "launched", "mod", "on_gpu", "proof", "tape")]
    texts = {path.stem: path.read_text() for path in sorted(files)}
    found = {}
    for name in declared():
        stem = re.sub(r"(_\d+)?_(f32|bf16)$", "", name)
        by = [file for file, text in texts.items() if f'"{name}"' in text or f'"{stem}_{{' in text or f'"{stem}"' in text]
        if not by:
            sys.exit(f"no tape of {TAPES} plays {name}")
        found[name] = ", ".join(by)
    return found


def table(limits, amd, nvidia):
    by = played()
    rows = ["| kernel | VGPR of | LDS | waves a SIMD of 8 | registers on sm_90a of | warps of 64 there | emulator and races |",
            "|---|---|---|---|---|---|---|"]
    for name in sorted(limits):
        limit, own, other = limits[name], amd[0][name], nvidia[0][name] if nvidia else {}
        registers = own["VGPRs"] + own["AGPRs"]
        shared, waves = own["LDS Size [bytes/block]"], own["Occupancy [waves/SIMD]"]
        on_nvidia, there = "not known", "not known"
        if other:
            on_nvidia = f"{other['registers']} of {SM_90A.get(name, limit['registers'])}"
            there = warps(other["registers"], other["shared"], limit["threads"])
        rows.append(f"| `{name}` | {registers} of {limit['registers']} | {shared} | {waves} | {on_nvidia} | {there} | `{by[name]}` |")
    return "\n".join(rows)


def searches_find():
    """What the searches are for is found by them: else an empty outcome would say nothing."""
    inexact = ["\tdiv.full.f32 \t%f3, %f1, %f2;", "add.ftz.f32 %f1, %f2, %f3;", "@%p1 ex2.approx.ftz.f32 %f1, %f2;"]
    exact = ["\tdiv.rn.f32 \t%f3, %f1, %f2;", "fma.rn.f32 %f1, %f2, %f3, %f4;", "sqrt.rn.f64 %fd1, %fd2;"]
    assert all(map(INEXACT.search, inexact)) and not any(map(INEXACT.search, exact))
    loads = ["\tld.global.v4.f32 \t{%f1, %f2, %f3, %f4}, [%rd1];", "\tglobal_load_dwordx4 v[0:3], v[4:5], off"]
    narrower = ["\tld.global.v2.f32 \t{%f1, %f2}, [%rd1];", "\tglobal_load_dwordx2 v[0:1], v[4:5], off"]
    assert all(one.search(load) and not one.search(other) for one, load, other in zip(AT_ONCE, loads, narrower))
    products = ["\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}", "\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]"]
    assert all(one.search(product) for one, product in zip(BY_MATRIX_UNITS, products))
    assert RELAXED.search("%3 = fmul contract float %1, %2") and not RELAXED.search("%3 = fmul float %1, %2")


def main():
    searches_find()
    if "--install" in sys.argv:
        install()
    with concurrent.futures.ThreadPoolExecutor() as compilers:
        limits, (amd, nvidia) = declared(), compilers.map(lambda compiler: compiler(), (gfx942, sm_90a))
    for what, report in (("gfx942: no clang", amd), ("sm_90a: no NVRTC", nvidia)):
        if report is None:
            print(f"SKIPPED {what} here; resources.py --install gets it", file=sys.stderr)
    if amd is None and nvidia is None:
        sys.exit(77)
    bad = offences(limits, amd, nvidia)
    if bad:
        sys.exit("\n".join(bad))
    where = [what for what, report in (("gfx942", amd), ("sm_90a", nvidia)) if report is not None]
    print(f"{len(limits)} kernels within their limits on {' and '.join(where)}")
    if "--write" in sys.argv and amd is not None:
        text = PAGE.read_text()
        start, end = "<!-- resources -->\n", "<!-- end of resources -->"
        before, rest = text.split(start)
        PAGE.write_text(before + start + table(limits, amd, nvidia) + "\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    main()
