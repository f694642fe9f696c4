"""Exceptions: one class for each exit code of the command `zdata`, under one base."""

from __future__ import annotations


class Error(Exception):
    """What went wrong (`what`), where (`place`), what was `found`, what was `wanted`, and what to do next (`hint`).

    `str(error)` is the text that the command prints. `exit_code` is the command's exit code.
    """

    exit_code: int = 1
    what: str = ""
    place: str | None = None
    found: str | None = None
    wanted: str | None = None
    hint: str | None = None

    def __reduce__(self):
        return (type(self), self.args, self.__dict__)


class BugError(Error):
    """A bug of ours."""

    exit_code = 1


class UsageError(Error):
    """Wrong use, or a file that cannot run."""

    exit_code = 2


class DataError(Error):
    """Data that is missing or damaged."""

    exit_code = 3


class MismatchError(Error):
    """Two digests that had to agree do not."""

    exit_code = 4


class DivergedError(Error):
    """The run diverged."""

    exit_code = 5


class MachineError(Error):
    """The machine failed or refused: disk full, no permission."""

    exit_code = 6


_CLASSES = {kind.exit_code: kind for kind in (BugError, UsageError, DataError, MismatchError, DivergedError, MachineError)}


def from_parts(exit_code, text, what, place, found, wanted, hint):
    """The exception of an exit code, which `_zdata` raises."""
    error = _CLASSES.get(exit_code, Error)(text)
    error.what, error.place, error.found, error.wanted, error.hint = what, place, found, wanted, hint
    return error
