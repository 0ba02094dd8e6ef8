"""Files that are replaced as a whole: the old one stays until the new one is there; dead writers leave nothing for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hsjournal.catalogue.whole import replaced

WRITER = """
import sys, time
from pathlib import Path
from hsjournal.catalogue.whole import replaced
with replaced(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_new_file_takes_the_olds_place(tmp_path: Path) -> None:
    path = tmp_path / "below" / "index"
    for content in (b"old", b"new"):
        with replaced(path) as file:
            file.write(content)
    assert path.read_bytes() == b"new"
    assert (names(path.parent), path.stat().st_mode & 0o777) == (["index"], 0o644)


def test_an_error_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"old")

    def refuse() -> None:
        raise RuntimeError("fenced")

    def write(fence: Callable[[], None], *, broken: bool) -> None:
        with replaced(path, fence) as file:
            file.write(b"half")
            if broken:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        write(lambda: None, broken=True)
    with pytest.raises(RuntimeError, match="fenced"):
        write(refuse, broken=False)
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["index"])


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "index"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with replaced(path) as file:
            file.write(b"ours")
        assert len(names(tmp_path)) == 2, "the living writer's hidden file is left alone"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        with replaced(path) as file:
            file.write(b"again")
        assert (path.read_bytes(), names(tmp_path)) == (b"again", ["index"])
    finally:
        writer.kill()
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()


def test_many_writers_at_once_each_write_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "index"
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(30):
                with replaced(path) as file:
                    file.write(b"%d" % number * 1000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert path.read_bytes() in {b"%d" % n * 1000 for n in range(4)}
    assert names(tmp_path) == ["index"]
