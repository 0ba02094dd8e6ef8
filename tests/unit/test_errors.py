"""Every error that a user may see says what to do next."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import hsjournal.errors
from hsjournal.errors import HsjournalError
from tests.helpers.cli import REPOSITORY

_OWN = {"ProbeError", "NoDumpError", "ProbeHeldError"}
"""Those of the preflight."""
_INSIDE = {"FencedError", "DumpRejectedError"}
"""For the program itself: a row's matter, or told in other words."""
WITHOUT = {
    "journal/group.py": "the program's own mistake",
    "journal/migrate.py": "the usage of a child, which only we start",
    "watch/farewell.py": "the supervisor's own mistake, whose end says more",
    "worker/__main__.py": "a crash: the supervisor starts another worker, and says what helps when it gives up",
}


def kinds() -> set[str]:
    """Names of the errors that carry a remedy."""
    found = {
        name for name, value in vars(hsjournal.errors).items() if isinstance(value, type) and issubclass(value, HsjournalError)
    }  # fmt: skip
    return (found | _OWN) - _INSIDE


def bare() -> Iterator[tuple[str, int]]:
    """Where an error is made without a remedy."""
    names = kinds()
    for path in sorted((REPOSITORY / "hsjournal").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
                continue
            if not any(keyword.arg == "remedy" for keyword in node.keywords):
                yield str(path.relative_to(REPOSITORY / "hsjournal")), node.lineno


def test_each_has_a_remedy_or_a_reason_for_none() -> None:
    assert [place for place in bare() if place[0] not in WITHOUT] == []


def test_no_reason_is_stale() -> None:
    assert {path for path, _ in bare()} == set(WITHOUT)
