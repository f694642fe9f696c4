"""Checks and measures a GPU: tests/device.sh. Needs Python alone; torch and transformers only for the row beside ours.

    python3 tests/device.py PACK OUT [--only CHECK ...] [--seconds 520] [--device cuda] [--steps 20] [--train | --replay TRAINED]
    python3 tests/device.py --merge OUT OTHER...

PACK has zdata, ztrain and, for the kernels alone, the test program `kernels`: the file that `tests/device.sh --pack` writes, or a folder.
Each check (tests/device_checks.py) ends as one of `ok`, `WRONG` and `skipped`, the last with its reason, and what is known by then is
written: whoever is stopped on the way leaves what was found. What OUT holds of the same programs and the same device stays, so that
several calls, each with some checks (--only), make one outcome; --merge does so with what other machines left. Exit 1 where something
is wrong, 6 where there is no such device or nothing starts.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import device_pack  # noqa: E402
from device_checks import Checks, Skip, Wrong  # noqa: E402


class Outcome:
    """What was found, in OUT: device.json, and device.txt for people."""

    def __init__(self, out):
        self.out, self.device, self.pretended, self.programs, self.libtorch, self.checks = out, {}, False, {}, "", {}
        out.mkdir(parents=True, exist_ok=True)

    def before(self, other):
        """Takes over what another outcome has of the same device and programs, and this one has not. Whether it is of the same."""
        if not other.is_file():
            return False
        found = json.loads(other.read_text())
        if not self.device:
            self.device, self.pretended = found["device"], found["pretended"]
            self.programs, self.libtorch = found["programs"], found["libtorch"]
        if [found[key] for key in ("device", "programs")] != [self.device, self.programs]:
            return False
        self.checks = found["checks"] | self.checks
        return True

    def put(self, name, outcome, told, seconds, numbers):
        self.checks[name] = {"outcome": outcome, "told": told, "seconds": round(seconds, 1), **numbers}
        self.write()
        return self.line(name)

    def line(self, name):
        one = self.checks[name]
        return f"{one['outcome']:8} {name:14} {one['seconds']:6.1f} s  {one['told']}"

    def level(self):
        """The row for the table of levels: what this shows of the kernel table at hand."""
        outcome = lambda name: self.checks.get(name, {}).get("outcome")
        held = all(outcome(name) == "ok" for name in ["kernels", "bits f32", "bits bf16"])
        # What has several outcomes, or more memory than a plan allows for, is no proof, whatever else held.
        held &= all(outcome(name) != "WRONG" for name in ["hash", "memory"])
        tables = [self.checks.get(name, {}) for name in ["bits f32", "bits bf16", "ranks"]]
        tables = [(one["fingerprint"], one["table"]) for one in tables if "fingerprint" in one]
        # Those of f32 and bf16 are one, and so is the one of several ranks.
        one_table = len({fingerprint for fingerprint, _ in tables}) == 1
        fingerprint, table = tables[0] if tables else ("", {})
        digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:16] if one_table else "none"
        levels = "D"
        if held and one_table and not self.pretended:
            levels = "D L0 L1 L2 L3" if outcome("ranks") == "ok" else "D L0"
        columns = [f"`{digest}`", self.device.get("name", "?"), self.device.get("architecture") or "none", table.get("libtorch", "?"),
                   table.get("operations", "?"), levels]
        return "| " + " | ".join(columns) + " |"

    def last(self):
        of = lambda outcome: sum(one["outcome"] == outcome for one in self.checks.values())
        seconds = sum(one["seconds"] for one in self.checks.values())
        return [f"{of('ok')} ok, {of('skipped')} skipped, {of('WRONG')} wrong, {seconds:.0f} s", f"table of levels: {self.level()}"]

    def write(self):
        whole = {"device": self.device, "pretended": self.pretended, "programs": self.programs, "libtorch": self.libtorch,
                 "checks": self.checks, "level": self.level()}
        lines = [self.line(name) for name in self.checks] + self.last()
        for name, text in [("device.json", json.dumps(whole, indent=1)), ("device.txt", "\n".join(lines))]:
            unfinished = self.out / f".{name}.tmp"
            unfinished.write_text(text + "\n")
            unfinished.rename(self.out / name)

    def end(self):
        print("\n".join(self.last()))
        wrong = any(one["outcome"] == "WRONG" for one in self.checks.values())
        return 1 if wrong else 0


def made(check):
    """How a check ended, what it told, its numbers."""
    try:
        return ("ok", *check())
    except Skip as why:
        return "skipped", str(why), {}
    except Wrong as why:
        return "WRONG", str(why), {}
    except Exception as why:  # A check that breaks is told like one that fails: the others are still made.
        return "WRONG", f"{type(why).__name__}: {why}", {}


def check_all(asked, outcome, work):
    begin = time.monotonic()
    try:
        folder = device_pack.unpacked(asked.pack, work)
        outcome.libtorch = device_pack.ready(folder)
    except device_pack.Unready as why:
        print(outcome.put("devices", "WRONG", str(why), time.monotonic() - begin, {}), flush=True)
        return 6
    print(outcome.libtorch, flush=True)
    outcome.programs = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                        for name in ["zdata", "ztrain", "kernels"] if (path := folder / name).is_file()}
    checks = Checks(asked, folder, work)
    for name, check in checks.all():
        if asked.only and name != "devices" and not any(name.startswith(only) for only in asked.only):
            continue
        begin = time.monotonic()
        how, told, numbers = made(check)
        outcome.device, outcome.pretended = checks.row, checks.pretended
        if name == "devices" and how == "ok":
            outcome.before(asked.out / "device.json")
        print(outcome.put(name, how, told, time.monotonic() - begin, numbers), flush=True)
        if name == "devices" and how != "ok":
            return 6
    return outcome.end()


def merge(out, others):
    outcome = Outcome(out)
    for other in others:
        if not outcome.before(other if other.is_file() else other / "device.json"):
            sys.exit(f"{other} is not of the same device and the same programs, or not there")
    outcome.write()
    print(outcome.out / "device.txt")
    return outcome.end()


def main():
    parser = argparse.ArgumentParser()
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", nargs="+", type=Path, metavar="OUT")
    how.add_argument("--pack", nargs=2, type=Path, metavar=("PROGRAMS", "FOLDER"), dest="packed")
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ops", choices=["device", "reference"], default="device", help="whose operations: our own kernels, or libtorch's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=520, help="for all checks")
    parser.add_argument("--patience", type=int, default=150, help="seconds for a run to come to where it is killed")
    parser.add_argument("--only", nargs="+", default=None, metavar="CHECK", help="those whose names begin so")
    also = parser.add_mutually_exclusive_group()
    also.add_argument("--train", action="store_true", help="leave runs in OUT/trained, and check nothing else")
    also.add_argument("--replay", type=Path, metavar="TRAINED", help="compute steps of such runs again")
    asked = parser.parse_args()
    if asked.packed:
        return device_pack.pack(*asked.packed)
    if asked.merge:
        return merge(asked.merge[0], asked.merge[1:])
    if asked.out is None:
        parser.error("wanted PACK and OUT")
    work = Path(tempfile.mkdtemp(prefix="device-"))
    try:
        return check_all(asked, Outcome(asked.out), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
