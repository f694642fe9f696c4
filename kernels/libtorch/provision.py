"""Puts libtorch where the build looks for it: `.libtorch` in the checkout, a link into the user's cache.

Fetches three wheels by pip with pinned SHA-256 sums, unpacks the CPU half, and is done: no root, no GPU,
no other tool. Runs once for a machine; two builds at once wait for each other.
"""

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
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_25_x86_64", "manylinux2014_x86_64"]


def cache() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "ztrain" / f"libtorch-{VERSION}-cpu"


def download(into: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--require-hashes"]
    command += [f"--platform={name}" for name in PLATFORMS]
    command += ["--requirement", str(HERE / "requirements.txt"), "--dest", str(into)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def unpack(wheel: pathlib.Path, into: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = pathlib.PurePosixPath(name)
            if name.startswith("torch/include/") and not name.endswith("/"):
                target = into / path.relative_to("torch")
            elif path.name in LIBRARIES:
                target = into / "lib" / path.name
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def build(home: pathlib.Path) -> None:
    print(f"libtorch {VERSION}: fetching 0.5 GB once into {home}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        wheels, tree = pathlib.Path(scratch, "wheels"), pathlib.Path(scratch, "tree")
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, tree)
        missing = [name for name in LIBRARIES if not (tree / "lib" / name).exists()]
        if missing:
            sys.exit(f"libtorch {VERSION}: the wheels hold no {', '.join(missing)}")
        # tch links -ltorch; the wheel's own libtorch.so drags in CUDA, a linker script does not.
        (tree / "lib" / "libtorch.so").write_text("INPUT(libtorch_cpu.so libc10.so)\n")
        (tree / "lib" / "libgomp.so").symlink_to("libgomp.so.1")
        (tree / "build-version").write_text(VERSION + "\n")
        tree.rename(home)


def main() -> None:
    home = cache()
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            build(home)
        if not (LINK / "build-version").exists():
            LINK.unlink(missing_ok=True)
            LINK.symlink_to(home)


main()
