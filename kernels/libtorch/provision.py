"""Puts libtorch where the build and `ztrain` look for it.

    python3 kernels/libtorch/provision.py           the CPU half: the build calls this by itself
    python3 kernels/libtorch/provision.py --cuda    NVIDIA's half and its libraries, for `ztrain --device cuda`

Fetches wheels by pip with pinned SHA-256 sums into the user's cache and unpacks what is needed: no root, no GPU, no other
tool. Runs once for a machine; two at once wait for each other. The CPU half is linked as `.libtorch` in the checkout; the
CUDA half is opened by `ztrain` when a device is asked for, so nothing is built anew.
"""

import argparse
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

VERSION = "2.11.0"
HERE = pathlib.Path(__file__).resolve().parent
LINK = HERE.parent.parent / ".libtorch"
# Everything else in the wheel is Python or belongs to a GPU. libtorch_cpu.so names the last two libraries
# (a handful of profiler symbols) and looks for them beside itself.
CPU = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
CUDA = ["libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libc10_cuda.so", "libcaffe2_nvrtc.so"]
GLIBC = [5, 12, 17, 18, 25, 27, 28]


def cache() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "ztrain"


def download(requirements: str, into: pathlib.Path) -> list[pathlib.Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--require-hashes"]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    command += ["--requirement", str(HERE / requirements), "--dest", str(into)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return sorted(into.glob("*.whl"))


def unpack(wheel: pathlib.Path, into: pathlib.Path, place) -> None:
    """What `place` has a path for."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            target = None if name.endswith("/") else place(pathlib.PurePosixPath(name))
            if target is None:
                continue
            target = into / target
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def cpu_place(path):
    if path.is_relative_to("torch/include"):
        return path.relative_to("torch")
    return pathlib.PurePosixPath("lib", path.name) if path.name in CPU else None


def cuda_place(path):
    # Where the wheels put it: these libraries look for each other there.
    return path if path.name in CUDA or path.parts[0] == "nvidia" and ".so" in path.name else None


def build(home: pathlib.Path, requirements: str, size: str, place, wanted: list[str]) -> None:
    print(f"libtorch {VERSION}: fetching {size} GB once into {home}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        tree = pathlib.Path(scratch, "tree")
        for wheel in download(requirements, pathlib.Path(scratch, "wheels")):
            unpack(wheel, tree, place)
            wheel.unlink()
        missing = [name for name in wanted if not (tree / name).exists()]
        if missing:
            sys.exit(f"libtorch {VERSION}: the wheels hold no {', '.join(missing)}")
        if place is cpu_place:
            # tch links -ltorch; the wheel's own libtorch.so drags in CUDA, a linker script does not.
            (tree / "lib" / "libtorch.so").write_text("INPUT(libtorch_cpu.so libc10.so)\n")
            (tree / "lib" / "libgomp.so").symlink_to("libgomp.so.1")
            (tree / "build-version").write_text(VERSION + "\n")
        tree.rename(home)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="fetch NVIDIA's half")
    cuda = parser.parse_args().cuda
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cuda:
            home = cache() / f"libtorch-{VERSION}-cuda"
            if not home.exists():
                build(home, "requirements-cuda.txt", "2.5", cuda_place, [f"torch/lib/{name}" for name in CUDA])
            print(f"NVIDIA's half of libtorch {VERSION} is in {home}; `ztrain devices` lists what it finds")
            return
        home = cache() / f"libtorch-{VERSION}-cpu"
        if not home.exists():
            build(home, "requirements.txt", "0.5", cpu_place, [f"lib/{name}" for name in CPU])
        if not (LINK / "build-version").exists():
            LINK.unlink(missing_ok=True)
            LINK.symlink_to(home)


if __name__ == "__main__":
    main()
