"""What an examination answers: lines of three levels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How a line is to be taken: ``fail`` would stop or lose a run, ``warn`` would slow it down or surprise."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """One answer.

    Args:
        subject: what was looked at, in one or two words.
        level: how it is.
        words: what was found, with figures.
        remedy: what to do about it; empty when it is well.
    """

    subject: str
    level: Level
    words: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it crosses a pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Line:
        """The inverse of :meth:`to_json`."""
        return cls(value["subject"], Level(value["level"]), value["words"], value["remedy"])


def ok(subject: str, words: str) -> Line:
    """A line that needs no remedy."""
    return Line(subject, Level.OK, words)


def warn(subject: str, words: str, remedy: str) -> Line:
    """A line that a run survives."""
    return Line(subject, Level.WARN, words, remedy)


def fail(subject: str, words: str, remedy: str) -> Line:
    """A line that a run does not survive."""
    return Line(subject, Level.FAIL, words, remedy)
