"""The report as a browser draws it: a finished run with a stall in it, printed by Chromium without a word of complaint."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import struct
import subprocess
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER: chromium is not installed, the report is not drawn"
)
BEGIN, ROWS = 1.76e9, 120
STALL = (BEGIN + 40 * 30, BEGIN + 40 * 30 + 1500)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 rows, one every half minute, but for 25 minutes in the middle."""
    folder = tmp_path_factory.mktemp("drawn")
    states = [State.VERIFIED] * (ROWS - 5) + [State.FAILED] * 3 + [State.SKIPPED] * 2
    run = make_run(folder, states, tokens=[64 * (1 + i % 9) + i % 7 for i in range(ROWS)])
    with closing(sqlite3.connect(run.paths.journal)) as connection, connection:
        for row in range(ROWS - 5):
            at = BEGIN + 30 * row + (STALL[1] - STALL[0] if row >= 40 else 0)
            connection.execute(
                "UPDATE sample SET verified_at = ?, sent_at = ? WHERE row = ?", (at, at - 2 - row % 5, row)
            )
        connection.execute("DELETE FROM event")
        connection.executemany(
            "INSERT INTO event (key, at, epoch, kind, row, detail) VALUES (?, ?, 1, ?, ?, ?)",
            [
                ("a", BEGIN - 9, "supervisor_started", None, '{"pid": 4711}'),
                ("b", STALL[0] + 300, "stall", 40, json.dumps({"verdict": "storage_stalled", "sentence": "sink-0 waits"})),
                ("c", STALL[0] + 310, "worker_died", None, json.dumps({"how": "SIGKILL", "by_us": True})),
                ("d", STALL[1], "recovered", None, json.dumps({"verdict": "storage_stalled", "after_s": 1500})),
            ],
        )  # fmt: skip
    done = hsjournal("report", run.paths.run_dir, "--to", folder / "page.html")
    assert done.code == 0, done.err
    return folder / "page.html"


def drawn(page: Path, to: Path, *, dark: bool = False, width: int = 1100) -> tuple[int, int, bytes]:
    """Width, height and pixels (RGB or RGBA rows, unfiltered bytes) of the page as Chromium draws it."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={to.parent / 'browser'}", f"--window-size={width},3000", f"--screenshot={to}",
        *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []), page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"CONSOLE.*", done.stderr), done.stderr
    return pixels(to.read_bytes())


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Of a PNG with 8 bits a channel; the bytes are those of the filtered rows, enough to tell empty from drawn."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth = struct.unpack(">IIB", png[16:25])
    assert depth == 8
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, zlib.decompress(data)


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it_and_says_nothing(page: Path, tmp_path: Path, dark: bool) -> None:
    width, height, rows = drawn(page, tmp_path / "page.png", dark=dark)
    assert (width, height) == (1100, 3000)
    line = len(rows) // height
    changing = sum(any(rows[line * y + 1 : line * (y + 1)]) for y in range(height))
    assert changing > 600, "the page is all but empty"


def test_it_is_printed_on_paper(page: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    to = tmp_path / "page.pdf"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
         "--no-pdf-header-footer", f"--print-to-pdf={to}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert to.read_bytes().startswith(b"%PDF-")
    assert to.stat().st_size > 20_000
