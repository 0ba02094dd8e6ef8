"""Nobody opens the journal's files except through SQLite (FAULTS F8): a plain open and close drops SQLite's locks.

Measured: the writer's process opens and closes the database as a plain file, another process opens and closes the
database properly, and the WAL is deleted under the writer; from then on its commits report success and are lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import hsjournal
from tests.helpers.journals import started
from tests.helpers.tiny_models import make_tiny_model

WATCH = """
# Put on the path of every Python of the test: notes who opens, copies or moves a journal's file past SQLite.
import os, sys

NAMES = ("journal.db", "journal.db-wal", "journal.db-shm")
EVENTS = ("open", "os.rename", "os.remove", "os.link", "os.truncate", "shutil.copyfile", "shutil.move")


def look(event, arguments):
    if event not in EVENTS:
        return
    for argument in arguments[:2]:
        if isinstance(argument, (str, bytes, os.PathLike)) and os.path.basename(os.fsdecode(argument)) in NAMES:
            fd = os.open(os.environ["WATCH_TO"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            frame = sys._getframe(1)
            os.write(fd, f"{event} {argument} by {' '.join(sys.argv[:2])} in {frame.f_code.co_filename}:{frame.f_lineno}\\n".encode())
            os.close(fd)


with open(os.environ["WATCH_TO"] + ".started", "a") as file:
    file.write(" ".join(sys.orig_argv[1:4]) + "\\n")
sys.addaudithook(look)
"""


@pytest.fixture
def watched(tmp_path) -> dict[str, Any]:
    """Environment under which every Python process reports; and where to."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WATCH)
    return {"PYTHONPATH": str(tmp_path / "site"), "WATCH_TO": str(tmp_path / "seen")}


def seen(environment: dict[str, str]) -> str:
    path = Path(environment["WATCH_TO"])
    return path.read_text() if path.exists() else ""


def test_the_watch_sees_what_it_is_to_see(tmp_path, watched: dict[str, Any]):
    code = f"open({str(tmp_path / 'journal.db')!r}, 'wb').close(); import os; os.open({str(tmp_path / 'journal.db-wal')!r}, os.O_CREAT)"
    subprocess.run([sys.executable, "-c", code], check=True, env=watched)
    assert len(seen(watched).splitlines()) == 2
    Path(watched["WATCH_TO"]).unlink()
    code = f"import sqlite3; c = sqlite3.connect({str(tmp_path / 'journal.db')!r}); c.execute('create table t (a)'); c.close()"
    subprocess.run([sys.executable, "-c", code], check=True, env=watched)
    assert seen(watched) == ""


def test_no_process_of_a_whole_run_touches_them(tmp_path, watched: dict[str, Any]):
    model = make_tiny_model("llama", tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"r{n}", "text": f"word {n} " * 5}) + "\n" for n in range(6)))
    run_dir = tmp_path / "run"
    crash: dict[str, Any] = {
        "HSJOURNAL_FAULTS": f"sink.linked=exit@3,once:{tmp_path / 'once'}"
    }  # a second life, with its gate
    (tmp_path / "once").touch()
    result = hsjournal(
        "run", run_dir, "--prompts", prompts, "--model", model, "--dtype", "float32", "--plain", **watched, **crash
    )
    assert result.code == 0, result
    assert not (tmp_path / "once").exists()
    for command in (
        ["status", run_dir],
        ["status", run_dir, "--json"],
        ["verify", run_dir],
        ["resume", run_dir, "--plain"],
    ):
        assert hsjournal(*command, **watched).code == 0
    processes = Path(watched["WATCH_TO"] + ".started").read_text()
    for name in (
        "hsjournal.worker",
        "hsjournal.journal.gate",
        "hsjournal.prepare",
        "hsjournal.cli.main run",
        "hsjournal.cli.main status",
    ):
        assert name in processes
    assert seen(watched) == ""


LOSE = """
    # The writer: commits, does {between!r} in between, commits again after another process came and went.
    import os, sqlite3, subprocess, sys
    from pathlib import Path
    from hsjournal.journal.fence import Fence
    from hsjournal.journal.locks import Lock, is_held
    from hsjournal.journal.reading import JournalReader
    from hsjournal.journal.store import Journal
    from hsjournal.states import State
    from tests.helpers.journals import put
    path = Path({path!r})
    lock = Lock(path.with_name("worker.lock")); lock.acquire()
    journal = Journal(path)
    Fence(path, 1)()
    put(journal, 0, State.SENT, 1)
    {between}
    subprocess.run([sys.executable, "-c", "import sqlite3; c = sqlite3.connect({path}); c.execute('select * from run').fetchall(); c.close()"], check=True)
    put(journal, 1, State.SENT, 1)
    seen = subprocess.run([sys.executable, "-c", "import sqlite3; print(sqlite3.connect({path}).execute('select count(*) from sample where state = \\\\'sent\\\\'').fetchone()[0])"], capture_output=True, text=True)
    print(seen.stdout.strip(), Path({path!r} + "-wal").exists())
"""


@pytest.mark.parametrize(
    ("between", "is_safe"),
    [
        ("open(path, 'rb').read()", False),  # the fault itself: this is what the rest of this file forbids
        ("is_held(path.with_name('worker.lock'))", True),
        ("list(JournalReader(path).all_rows())", True),
        ("Fence(path, 1)()", True),
        ("path.exists(), path.stat()", True),
        ("Journal(path).close()", True),
    ],
)
def test_what_a_writer_does_beside_its_journal_loses_no_commit(tmp_path, between, is_safe):
    path, _ = started(tmp_path)
    code = textwrap.dedent(LOSE).replace("{path!r}", repr(str(path))).replace("{path}", f"\\'{path}\\'")
    code = code.replace("{between!r}", repr(between)).replace("{between}", between)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == (["2", "True"] if is_safe else ["1", "False"])
