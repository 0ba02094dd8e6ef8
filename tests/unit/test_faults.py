"""Fault points: silent when off, exact when armed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hsjournal import faults
from hsjournal.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[2]


def child(spec: str, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from hsjournal import faults\n{code}"],
        check=False, capture_output=True, text=True, timeout=30, env=os.environ | {faults.VARIABLE: spec} | more,
    )  # fmt: skip


LOOP = "for n in range(5):\n    print(n, flush=True)\n    faults.point('sink.linked')"


@pytest.mark.parametrize(
    ("spec", "returncode", "printed"),
    [
        ("", 0, 5),
        ("sink.linked=kill", -signal.SIGKILL, 1),
        ("sink.linked=kill@3", -signal.SIGKILL, 3),
        ("sink.linked=exit@2", 70, 2),
        ("sink.linked=segv@4", -signal.SIGSEGV, 4),
        ("sink.linked=abort", -signal.SIGABRT, 1),
        ("sink.written=kill; sink.linked=exit@5;", 70, 5),
        ("sink.written=kill", 0, 5),
    ],
)
def test_a_point_acts_on_its_passage_and_no_other(spec, returncode, printed):
    done = child(spec, LOOP)
    assert (done.returncode, len(done.stdout.split())) == (returncode, printed)


def test_errno_and_raise_and_delay():
    done = child(
        "sink.writing=errno:ENOSPC; sink.synced=raise; sink.opened=delay:0.3@2",
        "import time\n"
        "try: faults.point('sink.writing')\nexcept OSError as error: print(error.errno)\n"
        "try: faults.point('sink.synced')\nexcept faults.InjectedError as error: print(error)\n"
        "for n in range(3):\n    begin = time.monotonic(); faults.point('sink.opened'); print(time.monotonic() - begin > 0.25)",
    )
    assert done.stdout.split("\n")[:5] == ["28", "fault point sink.synced", "False", "True", "False"]


def test_once_acts_in_one_process_only(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    spec = f"sink.linked=exit@2,once:{mark}"
    assert [child(spec, LOOP).returncode for _ in range(3)] == [70, 0, 0]
    assert not mark.exists()


def test_keyed_on_a_row_and_while_a_file_is_there(tmp_path):
    held = tmp_path / "held"
    code = "for n in range(5):\n    print(n, flush=True)\n    faults.point('sink.linked', n)"
    spec = f"sink.linked=exit,row:3,while:{held}"
    assert child(spec, code).returncode == 0
    held.touch()
    done = child(spec, code)
    assert (done.returncode, done.stdout.split()) == (70, ["0", "1", "2", "3"])


def test_stop_stops_the_process_until_it_is_let_go():
    code = "faults.point('sink.linked'); print('on')"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from hsjournal import faults\n{code}"],
        stdout=subprocess.PIPE, env=os.environ | {faults.VARIABLE: "sink.linked=stop"},
    )  # fmt: skip
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=10)
    assert out == b"on\n"


@pytest.mark.parametrize("spec", ["sink.lynked=kill", "sink.linked", "sink.linked=explode", "sink.linked=kill,when:x"])
def test_a_name_or_an_action_that_is_none_is_refused_at_the_start(spec):
    with pytest.raises(UsageError, match=r"faults\.py"):
        faults._parse(spec)


def test_off_it_costs_next_to_nothing():
    done = child(
        "", "import timeit; print(min(timeit.repeat(lambda: faults.point('sink.linked'), number=10000, repeat=5)))"
    )
    assert float(done.stdout) / 10_000 < 5e-6


def test_every_point_has_its_place_in_the_product_and_every_place_is_a_point():
    placed = set()
    for source in [*(PACKAGE / "hsjournal").rglob("*.py"), *(PACKAGE / "migrations").rglob("*.py")]:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("faults.point", "point") and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    placed.add(argument.value)
    assert placed == set(faults.POINTS)
