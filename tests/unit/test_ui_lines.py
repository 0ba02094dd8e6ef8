"""Lines go on while whoever takes them hangs."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from hsjournal.ui.lines import PATIENCE_S, Lines


def test_a_line_is_there_when_it_was_said() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.say("one")
    assert out.getvalue() == "one\n"
    lines.say("two")
    lines.close()
    assert out.getvalue() == "one\ntwo\n"


def test_a_pipe_that_nobody_empties_stops_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with fifo.open("w") as out:
        lines = Lines(out)
        begin = time.monotonic()
        for number in range(3000):
            lines.say(f"{number:06d} {'x' * 90}")
        assert time.monotonic() - begin < PATIENCE_S + 3
        heard = b""
        deadline = time.monotonic() + 10
        while b"002999" not in heard and time.monotonic() < deadline:
            try:
                heard += os.read(reader, 1 << 16)
            except BlockingIOError:
                time.sleep(0.01)
        told = [int(line[:6]) for line in heard.decode().splitlines()]
        assert told == sorted(told)
        assert told[0] == 0
        assert told[-1] == 2999
        lines.close()
    os.close(reader)


def say_often(lines: Lines) -> None:
    for _ in range(50):
        lines.say("not heard")


def test_who_no_longer_listens_is_noticed() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        lines = Lines(out)
        lines.say("heard")
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            say_often(lines)
