"""Lets PyTorch's wheel for NVIDIA be imported without NVIDIA's libraries, which are three gigabytes: CPU tests need none.

    python tests/torch_alone.py        with the Python that has torch

Each library that is missing gets a stand-in, whose functions nothing calls where there is no GPU.
"""

import importlib.util
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux")
# Cannot be loaded without the library that it wraps.
WRAPPER = "libtorch_nvshmem.so"


def lines(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def stand_in(place, versions, scratch):
    """A library in `place` with these functions, by their version."""
    source, script = Path(scratch, "stand_in.c"), Path(scratch, "versions")
    source.write_text("".join(f"int {name}(void){{return 1;}}\n" for names in versions.values() for name in sorted(names)))
    named = {version: "".join(f"{name};" for name in sorted(names)) for version, names in versions.items() if version}
    script.write_text("".join(f"{version} {{ global: {names} }};\n" for version, names in named.items()))
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{place.name}", "-o", scratch + "/made.so", source]
    subprocess.run(command + ([f"-Wl,--version-script={script}"] if named else []), check=True)
    place.unlink(missing_ok=True)
    Path(scratch, "made.so").rename(place)


def main():
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    site = Path(sysconfig.get_paths()["platlib"])
    there = {path.name for path in [*library.iterdir(), *site.glob("nvidia/**/*.so*")]} - {WRAPPER}
    readers = [path for path in library.glob("lib*.so*") if path.name not in (WRAPPER, "libtorch_cuda_linalg.so")]
    missing, owners, wanted = {}, {}, set()
    for reader in readers:
        for line in lines("readelf", "-dVW", reader):
            if found := re.search(r"NEEDED.*\[(.*)\]", line):
                if found[1] not in there and not SYSTEM.match(found[1]):
                    missing.setdefault(found[1], {})
            elif found := re.search(r"File: (\S+)", line):
                owner = found[1]
            elif found := re.search(r"Name: (\S+)\s+Flags", line):
                owners[found[1]] = owner
        wanted |= {line.split()[-1] for line in lines("nm", "-D", "--undefined-only", reader)}
    wrapped = {line.split()[-1].partition("@")[0] for line in lines("nm", "-D", "--defined-only", library / WRAPPER)}
    missing[WRAPPER] = {"": wrapped & wanted}
    for name in wanted:
        name, _, version = name.partition("@")
        owner = owners.get(version) if version else "libnccl.so.2" if re.match("cu[A-Za-z]|nccl", name) else None
        if owner in missing:
            missing[owner].setdefault(version, set()).add(name)
    with tempfile.TemporaryDirectory(dir=library) as scratch:
        for name, versions in missing.items():
            stand_in(library / name, versions, scratch)


if __name__ == "__main__":
    main()
