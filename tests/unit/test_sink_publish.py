from __future__ import annotations

import errno
import fcntl
import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsjournal.errors import FencedError
from hsjournal.sink import folders, publish
from hsjournal.sink.folders import list_temporaries, make_output_folder, remove_temporaries, set_file_aside
from hsjournal.sink.sample import Written
from tests.helpers.sinks import Place, ignore

FINAL = "rows_0-2000/data_7.ckpt"


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture(params=["nameless", "hidden", "no links"])
def way(request, monkeypatch):
    """Each way of publishing: O_TMPFILE, a hidden temporary, and the rename that never replaces."""
    if request.param != "nameless":
        real = os.open

        def no_tmpfile(path, flags, *args, **kwargs):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", no_tmpfile)
    if request.param == "no links":

        def no_link(*_, **__):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", no_link)
    return request.param


def test_a_file_is_published_whole_and_nothing_else_lies_there(place, way):
    made = place.make()
    written = place.write(made)
    assert place.files() == [FINAL]
    assert (written.adopted, written.displaced) == (False, None)
    place.verify(made, written)


def test_the_same_bytes_under_the_name_are_adopted(place, way):
    made = place.make()
    first = place.write(made)
    inode = (place.out / FINAL).stat().st_ino
    second = place.write(made)
    assert second.adopted
    assert second.output_xxh3 == first.output_xxh3
    assert (place.out / FINAL).stat().st_ino == inode
    assert place.files() == [FINAL]


@pytest.mark.parametrize("content", [b"", b"somebody's", b"same size"])
def test_other_bytes_are_set_aside_and_never_lost(place, way, content):
    made = place.make()
    if content == b"same size":
        written = place.write(made)
        content = b"x" * written.nbytes
    (place.out / "rows_0-2000").mkdir(exist_ok=True)
    (place.out / FINAL).write_bytes(content)
    written = place.write(made)
    assert not written.adopted
    assert written.displaced is not None
    assert Path(written.displaced).read_bytes() == content
    assert Path(written.displaced).parent == place.rejects
    place.verify(made, written)
    assert place.files() == [FINAL]


def test_several_are_set_aside_side_by_side(place):
    for attempt in (1, 2, 3):
        place.write(place.make(attempt=attempt, seed=attempt))
    assert sorted(p.name for p in place.rejects.iterdir()) == ["rows_0-2000_data_7.ckpt.1", "rows_0-2000_data_7.ckpt.2"]


def test_a_link_under_the_name_is_set_aside_and_not_followed(place, way):
    precious = place.base / "precious"
    precious.write_text("x")
    (place.out / "rows_0-2000").mkdir()
    (place.out / FINAL).symlink_to(precious)
    made = place.make()
    written = place.write(made)
    place.verify(made, written)
    assert precious.read_text() == "x"
    assert Path(written.displaced or "").is_symlink()


def test_a_link_for_a_folder_is_not_followed(place):
    elsewhere = place.base / "elsewhere"
    elsewhere.mkdir()
    (place.out / "rows_0-2000").symlink_to(elsewhere)
    with pytest.raises(OSError) as caught:
        place.write(place.make())
    assert caught.value.errno in (errno.ENOTDIR, errno.ELOOP)
    assert list(elsewhere.iterdir()) == []


def test_a_folder_under_the_name_is_told(place):
    (place.out / FINAL).mkdir(parents=True)
    with pytest.raises(FileExistsError, match="a folder stands"):
        place.write(place.make())
    assert (place.out / FINAL).is_dir()


def test_an_older_worker_that_wakes_up_displaces_nothing(place):
    """It was stopped before its link, its successor has published; now it goes on."""
    newer = place.make(attempt=2, seed=2)
    first: list[Written] = []

    def fence() -> None:
        """Passed before the link; the newer worker took over right then, and is found out at the second look."""
        if first:
            raise FencedError("a newer worker owns the run")
        first.append(place.write(newer))

    older = place.make(attempt=1, seed=1)
    with older.opened() as dump, pytest.raises(FencedError):
        place.sink(fence=fence).write(dump, older.sample, ignore)
    assert place.files() == [FINAL]
    place.verify(newer, first[0])
    assert not place.rejects.exists()


def test_a_process_stuck_in_setting_aside_keeps_everybody_from_publishing(place, monkeypatch):
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.2)
    made = place.make()
    stuck = os.open(place.out, os.O_RDONLY)
    fcntl.flock(stuck, fcntl.LOCK_EX)
    try:
        with pytest.raises(OSError) as caught:
            place.write(made)
        assert caught.value.errno == errno.EBUSY
        assert "stuck" in str(caught.value)
        assert place.files() == []
    finally:
        os.close(stuck)
    place.verify(made, place.write(made))


def test_a_file_that_was_replaced_since_it_was_judged_is_judged_again(place, monkeypatch):
    (place.out / "rows_0-2000").mkdir()
    (place.out / FINAL).write_bytes(b"old")
    made = place.make()
    real = publish.Publication._existing
    seen: list[object] = []

    def late(self, *args):
        found = real(self, *args)
        if not seen:
            seen.append(found)
            (place.out / "other").write_bytes(b"newer")
            os.replace(place.out / "other", place.out / FINAL)
        return found

    monkeypatch.setattr(publish.Publication, "_existing", late)
    written = place.write(made)
    assert Path(written.displaced or "").read_bytes() == b"newer"


def test_data_then_link_then_every_folder_is_made_durable(place, monkeypatch):
    calls: list[str] = []
    for name in ("fdatasync", "link", "fsync"):
        real = getattr(os, name)

        def noted(*args, _real=real, _name=name, **kwargs):
            target = os.readlink(f"/proc/self/fd/{args[0]}") if _name == "fsync" else ""
            calls.append(f"{_name} {target.removeprefix(str(place.base))}".strip())
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, noted)
    made = place.make()
    calls.clear()
    place.write(made)
    assert calls == ["fsync /out", "fdatasync", "link", "fsync /out/rows_0-2000", "fsync /out"]
    second = place.make(row=8)
    (place.out / FINAL).unlink()
    sink = place.sink()
    for sample, also in ((made, ["fsync /out"]), (second, [])):  # the folder's own name once a process is enough
        calls.clear()
        with sample.opened() as dump:
            sink.write(dump, sample.sample, ignore)
        assert calls == ["fdatasync", "link", "fsync /out/rows_0-2000", *also]
    sink.close()


def test_temporaries_match_no_trainers_glob_and_are_found_by_name(place, monkeypatch):
    made = place.make()
    name = folders.temporary_name(made.sample.rid)
    folder = place.out / "rows_0-2000"
    folder.mkdir()
    (folder / name).write_text("half")
    (folder / ".hsjournal-hsj-other-1-1-1-00000000.tmp").write_text("another run's")
    (folder / "notes.tmp").write_text("a person's")
    assert glob.glob(f"{place.out}/**/*.ckpt*", recursive=True) == []
    assert list(place.out.rglob("*.ckpt*")) == []
    assert list_temporaries(place.out, "abcd") == [f"rows_0-2000/{name}"]
    assert remove_temporaries(place.out, "abcd") == 1
    assert len(place.files()) == 2


def test_setting_aside_reaches_another_file_system(place):
    import shutil
    import tempfile

    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        assert other.stat().st_dev != place.base.stat().st_dev
        (other / "data.1").write_text("taken")
        (place.out / "data").write_text("content")
        fd = os.open(place.out, os.O_RDONLY)
        target = set_file_aside(fd, "data", "data", other)
        os.close(fd)
        assert target == other / "data.2"
        assert target.read_text() == "content"
        assert place.files() == []
    finally:
        shutil.rmtree(other)


def test_the_output_folder_is_made_with_all_above_it(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def noted(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    make_output_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_output_folder(tmp_path / "a" / "b")


KILLED = """
import sys
from pathlib import Path
from tests.helpers.sinks import Place
place = Place(Path(sys.argv[1]))
made = place.make()
print("made", flush=True)
place.write(made)
"""


@pytest.mark.parametrize(
    "point", ["sink.opened", "sink.writing", "sink.written", "sink.synced", "sink.linked", "sink.published"]
)
def test_a_kill_at_any_step_leaves_no_half_file(place, point):
    """A real SIGKILL, in a process of its own; then the next attempt finishes."""
    env = {**os.environ, "HSJOURNAL_FAULTS": f"{point}=kill"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(place.base)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    there = point in ("sink.linked", "sink.published")
    assert place.files() == ([FINAL] if there else [])
    import shutil

    shutil.rmtree(place.root)
    made = place.make()  # the same seed, the same dump
    written = place.write(made)
    assert written.adopted is there
    place.verify(made, written)
