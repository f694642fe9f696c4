"""Programs for a machine that builds nothing: packed into one file, unpacked there, and started with the libtorch that is there."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the check itself consists of: the pack alone is enough.
SCRIPTS = ["tests/device.sh", "tests/device.py", "tests/device_checks.py", "tests/device_pack.py",
           "trainer/benches/side_by_side.py"]
# What machines that are reached by copying take, with room for the project's files beside it.
MOST = 56 << 20


class Unready(Exception):
    """Why nothing can be started here, in one line."""


def strip(program):
    """Leaves out what only a debugger reads, where it is a program and there is a strip."""
    if program.read_bytes()[:4] == b"\x7fELF" and shutil.which("strip"):
        subprocess.run(["strip", program], check=True)


def pack(programs, folder):
    """Writes folder/pack.tar.xz from a folder with zdata, ztrain and, for the kernels alone, the test program and what the emulator
    leaves. The same files make the same bytes."""
    work = folder / "packed"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name in ["zdata", "ztrain", "kernels"]:
        if (programs / name).is_file():
            shutil.copy(programs / name, work / name)
            strip(work / name)
        elif name != "kernels":
            sys.exit(f"no program {name} in {programs}")
    if (programs / "emulated").is_dir():
        shutil.copytree(programs / "emulated", work / "emulated")
    for script in SCRIPTS:
        (work / script).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / script, work / script)

    def plain(entry):
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    packed, unfinished = folder / "pack.tar.xz", folder / "pack.tar.xz.tmp"
    with tarfile.open(unfinished, "w:xz", preset=6) as out:
        for file in sorted(path for path in work.rglob("*") if path.is_file()):
            out.add(file, str(file.relative_to(work)), filter=plain)
    unfinished.rename(packed)
    shutil.rmtree(work)
    size = packed.stat().st_size
    print(f"packed {size / 2**20:.1f} MiB: sh tests/device.sh {packed} OUT")
    if size > MOST:
        sys.exit(f"{packed} is larger than {MOST >> 20} MiB: some machines will not take it")


def unpacked(given, work):
    """The folder of programs: what was given, or what that file holds, under `work`."""
    if given.is_dir():
        return given.resolve()
    try:
        folder = work / "programs"
        folder.mkdir()
        with tarfile.open(given) as held:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            held.extractall(folder, **safe)
        return folder
    except (OSError, tarfile.TarError) as why:
        raise Unready(f"{given} is no folder and no pack: {why}") from None


def answer(folder, *words):
    """What ztrain says, or why it does not start."""
    try:
        ran = subprocess.run([str(folder / "ztrain"), *words], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as why:
        return None, str(why)
    return (ran.stdout, "") if ran.returncode == 0 else (None, (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1])


def libraries():
    """Folders of the libtorch that this Python has, and of what NVIDIA's wheels put beside it; without opening any."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return []
    torch = Path(found.submodule_search_locations[0])
    vendors = sorted(path for path in torch.parent.glob("nvidia/*/lib") if path.is_dir())
    return [torch / "lib", *vendors]


def ready(folder):
    """Sees to it that ztrain starts, and finds a GPU if there is one: as it was built, else with this Python's libtorch. A word on
    which."""
    said, why = answer(folder, "--version")
    if said is not None and '"cuda:' in (answer(folder, "devices", "--json")[0] or ""):
        return f"{said.strip()}, with the libtorch that it was built with"
    before, here = os.environ.get("LD_LIBRARY_PATH"), libraries()
    if here:
        others = [before] if before else []
        os.environ["LD_LIBRARY_PATH"] = ":".join([*map(str, here), *others])
        with_it, refused = answer(folder, "--version")
        if with_it is not None:
            return f"{with_it.strip()}, with the libtorch of this Python: {here[0]}"
        os.environ.pop("LD_LIBRARY_PATH")
        if before:
            os.environ["LD_LIBRARY_PATH"] = before
        if said is None:
            raise Unready(f"ztrain does not start, nor with {here[0]}: {refused}")
    if said is None:
        raise Unready(f"ztrain does not start, and this Python has no torch whose libraries it could take: {why}")
    return f"{said.strip()}, with the libtorch that it was built with"
