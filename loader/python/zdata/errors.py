"""Exceptions: one class for each exit code of the command `zdata`, under one base."""

from __future__ import annotations

import operator


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


def whole(name: str, value: int) -> int:
    """A whole number that the compiled half takes, or an error that names the argument."""
    number = operator.index(value)
    if not 0 <= number < 1 << 63:
        error = UsageError(f"{name} is {number}, wanted a whole number from 0 on")
        error.what, error.place, error.found, error.wanted = str(error), name, str(number), "a whole number from 0 on"
        raise error
    return number


_CLASSES = {kind.exit_code: kind for kind in (BugError, UsageError, DataError, MismatchError, DivergedError, MachineError)}


def from_parts(exit_code, text, what, place, found, wanted, hint):
    """The exception of an exit code, which `_zdata` raises."""
    error = _CLASSES.get(exit_code, Error)(text)
    error.what, error.place, error.found, error.wanted, error.hint = what, place, found, wanted, hint
    return error
