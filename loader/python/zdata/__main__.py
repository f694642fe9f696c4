"""The command `zdata`: the same program as the Rust binary."""

import os
import shutil
import signal
import sys

from ._zdata import main as run


def main() -> int:
    """Runs the command line; returns its exit code."""
    # Python's handler would only note Ctrl-C until a build has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    script = os.path.join(os.path.dirname(sys.executable), "zdata")
    program = script if os.access(script, os.X_OK) else shutil.which("zdata") or sys.argv[0]
    return run(program, ["zdata", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
