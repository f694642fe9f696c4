"""Answers of `_zdata` as dataclasses."""

from __future__ import annotations

from dataclasses import fields


def build(kind, answer, **converted):
    """A dataclass from the keys of an answer that it has; the fields in `converted` are given as they are."""
    known = {field.name for field in fields(kind)} - converted.keys()
    return kind(**{key: value for key, value in answer.items() if key in known}, **converted)


def pair(value):
    """A pair, or None."""
    return None if value is None else (value[0], value[1])
