"""``hsjournal serve``: the embedded engine in this process. The only place that imports :mod:`hsjournal.capture`."""

from __future__ import annotations

from collections.abc import Sequence


def serve(arguments: Sequence[str]) -> int:
    """Run the engine with its own command line; the exit code."""
    from hsjournal.capture.embedded.__main__ import main

    return main(arguments)
