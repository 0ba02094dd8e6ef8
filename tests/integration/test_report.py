"""report: one page that loads nothing, tells what the journal holds, and is not fooled by text from outside."""

from __future__ import annotations

import json
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import MadeRun, make_run

EVIL = "<script>alert(1)</script> & \x1b[31m"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    states = [State.VERIFIED] * 5 + [State.FAILED, State.FAILED, State.SKIPPED, State.PENDING]
    run = make_run(tmp_path_factory.mktemp("report"), states, tokens=[5, 9, 17, 33, 65, 64, 128, 3, 700])
    with sqlite3.connect(run.paths.journal) as connection:
        for row in range(5):
            connection.execute(
                "UPDATE sample SET verified_at = ?, sent_at = ? WHERE row = ?",
                (1e9 + 600 * row, 1e9 + 600 * row - 2, row),
            )
        connection.execute("UPDATE sample SET reason = ? WHERE row = 5", (EVIL,))
        connection.execute("DELETE FROM event")
        connection.executemany(
            "INSERT INTO event (key, at, epoch, kind, row, detail) VALUES (?, ?, 1, ?, ?, ?)",
            [
                ("a", 1e9 + 900, "stall", 2, json.dumps({"verdict": "storage_stalled", "wchan": EVIL})),
                ("b", 1e9 + 1000, "resumed", None, "{}"),
                ("c", 1e9 + 1001, "reconciled", None, "{}"),
            ],
        )
    connection.close()
    return run


@pytest.fixture(scope="module")
def page(run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    before = run.bytes_of()
    done = hsjournal("report", run.paths.run_dir, "--to", file)
    assert done.code == 0, done.err
    assert str(file) in done.out
    assert run.bytes_of() == before
    return file.read_text()


def test_it_loads_nothing_and_runs_nothing(page: str) -> None:
    parsed = Page(page)
    assert {"script", "img", "link", "iframe", "object"}.isdisjoint(parsed.tags)
    assert not [a for a in parsed.attributes if a[0] in ("src", "href") or a[0].startswith("on")]
    assert "url(" not in page
    assert "\x1b" not in page
    assert "<script>" not in page
    assert any("<script>alert(1)" in text for text in parsed.words)  # shown as text


def test_it_tells_what_the_journal_holds(page: str, run: MadeRun) -> None:
    text = " ".join(Page(page).words)
    assert "8 of 9 rows done (88.9 %)" in text
    assert re.search(r"verified\s+5\s+129", text)
    assert "p50 2 s" in text
    assert "storage_stalled" in text
    assert "reconciled 1" in text
    assert str(run.manifest.model_sha256) in text
    assert page.count('class="mark stall"') == 1
    assert page.count('class="mark recovery"') == 1


def test_lengths_that_fail_together_stand_out(page: str) -> None:
    strips = re.findall(r'viewBox="0 0 640 14".*?</svg>', page)
    assert len(strips) == 2  # two reasons
    assert all('fill-opacity="1.00"><title>0: 1</title>' in strip for strip in strips)  # 64 and 128


def test_the_facts_as_json(run: MadeRun) -> None:
    facts = hsjournal("report", run.paths.run_dir, "--json").json()
    assert facts["version"] == 1
    assert sum(step["rows"] for step in facts["steps"]) == 5
    assert sum(rows for _, _, rows in facts["lengths"]) == 8
    assert sum(rows for _, _, rows in facts["latencies"]) == 5
    assert facts["latency_quantiles"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.PENDING])
    done = hsjournal("report", run.paths.run_dir, "--to", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "Nothing is verified yet" in (tmp_path / "page.html").read_text()


def test_no_run_and_no_place(tmp_path: Path) -> None:
    assert hsjournal("report", tmp_path, "--to", tmp_path / "p").code == 10
    run = make_run(tmp_path, [State.PENDING])
    done = hsjournal("report", run.paths.run_dir, "--to", tmp_path)
    assert (done.code, "is a folder" in done.err) == (2, True)
