"""A pytest plugin of ``scripts/test``: how many minutes each tier took, fixtures included."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: Counter[str] = Counter()


def tier_of(path: Path) -> str:
    """The folder right below ``tests``."""
    parts = path.parts
    return parts[len(parts) - 1 - parts[::-1].index("tests") + 1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    begin = time.monotonic()
    try:
        return (yield)
    finally:
        tier = tier_of(item.path)
        _seconds[tier] += time.monotonic() - begin
        _tests[tier] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("minutes by tier")
    for tier, seconds in _seconds.items():
        terminalreporter.write_line(f"{tier:<12} {seconds / 60:6.2f} min  {_tests[tier]:5d} tests")
    terminalreporter.write_line(f"{'together':<12} {sum(_seconds.values()) / 60:6.2f} min  {_tests.total():5d} tests")
