"""The table of verdicts: whole, and the same as in the README."""

from __future__ import annotations

from pathlib import Path

from hsjournal.watch.deeds import MEANINGS, Deed, table
from hsjournal.watch.verdict import PAUSES, Verdict

README = Path(__file__).resolve().parents[2] / "README.md"


def test_every_verdict_has_its_line() -> None:
    assert list(MEANINGS) == [*dict.fromkeys(MEANINGS)]
    assert set(MEANINGS) == set(Verdict)
    assert all(m.means and m.does and m.way_out for m in MEANINGS.values())


def test_the_readme_shows_this_very_table() -> None:
    """Make it anew with ``python -c "from hsjournal.watch.deeds import table; print(table())"``."""
    assert table() in README.read_text()


def test_a_pause_that_the_worker_explains_never_ends_it() -> None:
    assert {v for v, m in MEANINGS.items() if m.deed is Deed.WAIT} == PAUSES
    assert {v for v, m in MEANINGS.items() if m.deed is Deed.END_WORKER} == {
        Verdict.STORAGE_STALLED,
        Verdict.WORKER_STOPPED,
        Verdict.WORKER_STUCK,
    }
