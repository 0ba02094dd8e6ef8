"""Throw-away children: an answer, an error of ours, or a deadline; never a wait without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hsjournal.errors import ExitCode
from hsjournal.watch.children import ChildError, Patient, StuckError, ask, exit_words, module, peek_at, start


@pytest.fixture(autouse=True)
def nothing_leaks():
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= fds  # those of others may go meanwhile


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_last_line_is_the_answer():
    assert ask(python("print('words'); print('{\"a\": [1]}')"), 10) == {"a": [1]}
    assert ask(python("pass"), 10) == {}


def test_a_hanging_child_is_killed_at_its_deadline_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)"
    )
    begin = time.monotonic()
    with pytest.raises(StuckError, match=r"no answer within 3.0 s: the storage hangs"):
        ask(python(code), 3.0)
    assert time.monotonic() - begin < 6
    child, grandchild = map(int, pids.read_text().split())
    assert not psutil.pid_exists(child), "it is reaped"
    deadline = time.monotonic() + 5
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_child_that_blocks_on_a_fifo_as_on_a_stuck_disk(tmp_path):
    fifo = tmp_path / "journal.db"
    os.mkfifo(fifo)
    begin = time.monotonic()
    with pytest.raises(StuckError):
        peek_at(fifo, 0.5)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("code", "exit_code", "remedy"),
    [
        (
            'print(\'{"error": "no room", "exit_code": 5, "remedy": "make some"}\'); exit(5)',
            ExitCode.NO_ROOM,
            "make some",
        ),
        ('print(\'{"error": "no room"}\')', ExitCode.ERROR, None),
        ('print(\'{"error": "no room", "exit_code": 77}\')', ExitCode.ERROR, None),
    ],
)
def test_an_error_of_ours_keeps_its_words_and_its_exit_code(code, exit_code, remedy):
    with pytest.raises(ChildError) as caught:
        ask(python(code), 10)
    assert (caught.value.message, caught.value.exit_code, caught.value.remedy) == ("no room", exit_code, remedy)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('odd')", "exit code 1: ValueError: odd"),
        ("exit(3)", "exit code 3: it said nothing"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV: it said nothing"),
        ("print('{broken'); exit(2)", "exit code 2"),
        ("print('[1]')", "exit code 0"),
    ],
)
def test_any_other_end_is_told_in_words(code, words):
    with pytest.raises(ChildError, match=words):
        ask(python(code), 10)


def test_a_lot_of_words_do_not_block_the_child():
    assert ask(python("import sys; sys.stderr.write('x' * 10**6); print('y' * 10**6); print('{}')"), 20) == {}


def test_a_child_is_in_a_session_of_its_own_and_inherits_only_its_lifeline():
    read_end, write_end = os.pipe()
    extra = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(extra, True)
    code = f"import os; print(os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/{read_end}')[:4], os.path.exists('/proc/self/fd/{extra}'), os.environ['MORE'])"
    child = start(python(code), lifeline=read_end, stdout=subprocess.PIPE, environment={"MORE": "yes"})
    out, _ = child.communicate(timeout=10)
    assert out.decode().split() == ["True", "pipe", "False", "yes"]
    for fd in (read_end, write_end, extra):
        os.close(fd)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(None, "no exit code yet"), (0, "exit code 0"), (-signal.SIGBUS, "SIGBUS"), (-9, "SIGKILL"), (-77, "signal 77")],
)
def test_exit_words(returncode, words):
    assert exit_words(returncode) == words


def test_a_module_is_started_by_this_python():
    assert module("hsjournal.worker", "a", "b") == [sys.executable, "-m", "hsjournal.worker", "a", "b"]
    assert Path(sys.executable).exists()


def test_a_step_is_as_old_as_since_it_was_begun_and_not_as_its_child() -> None:
    """On a busy machine the interpreter alone may take seconds, and no storage hangs."""
    code = 'import time; time.sleep(1); print(\'{"step": "writing"}\', flush=True); time.sleep(60)'
    child = Patient([sys.executable, "-c", code])
    try:
        while not child.step:
            child.look()
            time.sleep(0.02)
        assert child.step_age < child.age - 0.9
    finally:
        child.close()
