from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hsjournal import faults
from hsjournal.dump.protocol import RequestId
from hsjournal.errors import DumpRejectedError, FencedError, Reject
from hsjournal.sink import blocks, gather, reserve
from tests.helpers.sinks import Place, bits_of, ignore


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture(autouse=True)
def nothing_leaks():
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert len(os.listdir("/proc/self/fd")) <= fds  # those of others may go meanwhile
    assert threading.active_count() <= threads


def poison(place: Place, tensor: str, cells: list[tuple[int, int]], value: int = 0x7FC0):
    def edit(tmp: Path) -> None:
        bits = np.fromfile(tmp / f"{tensor}.bin", dtype=np.uint16).reshape(-1, 64)
        for row, column in cells:
            bits[row, column] = value
        bits.tofile(tmp / f"{tensor}.bin")

    return place.make(300, edit=edit)


@pytest.mark.parametrize(
    ("tensor", "value"), [("aux_0", 0x7FC0), ("aux_2", 0x7F80), ("final", 0xFF80), ("final", 0xFFFF)]
)
@pytest.mark.parametrize("scatter_from", [1, 1 << 20])
def test_what_is_not_finite_is_named_with_file_row_and_count(place, monkeypatch, tensor, value, scatter_from):
    monkeypatch.setattr(gather, "COPY_BELOW", scatter_from)
    made = poison(place, tensor, [(299, 63), (17, 0), (17, 1)], value)
    with pytest.raises(DumpRejectedError) as caught:
        place.write(made)
    assert caught.value.reason is Reject.NOT_FINITE
    assert caught.value.detail == f"{tensor}.bin holds NaN or infinity: 3 values in 2 of 300 rows, the first in row 17"
    assert place.files() == []


@pytest.mark.parametrize("file", ["aux_0.bin", "aux_1.bin", "final.bin"])
@pytest.mark.parametrize("scatter_from", [1, 1 << 20])
def test_a_dump_that_is_cut_while_it_is_read_is_rejected(place, monkeypatch, file, scatter_from):
    monkeypatch.setattr(gather, "COPY_BELOW", scatter_from)
    made = place.make(300)
    sink = place.sink()
    with made.opened() as dump:
        os.truncate(made.dump.path / file, 100 * 128 + 5)
        with pytest.raises(DumpRejectedError) as caught:
            sink.write(dump, made.sample, ignore)
    assert caught.value.reason is Reject.WRONG_SIZE
    assert caught.value.detail.startswith(f"{file} ends after 12,805 bytes")
    assert place.files() == []


def test_a_dump_that_is_cut_and_deleted_has_vanished(place):
    made = place.make(300)
    with made.opened() as dump:
        os.truncate(made.dump.path / "aux_0.bin", 0)
        (made.dump.path / "aux_0.bin").unlink()
        with pytest.raises(DumpRejectedError) as caught:
            place.sink().write(dump, made.sample, ignore)
    assert caught.value.reason is Reject.VANISHED


def test_a_dump_that_cannot_be_read_is_no_trouble_of_the_output(place, monkeypatch):
    made = place.make(300)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with made.opened() as dump, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(DumpRejectedError) as caught:
            place.sink().write(dump, made.sample, ignore)
    assert caught.value.reason is Reject.VANISHED
    assert "Input/output error" in caught.value.detail


def test_reads_that_come_in_pieces_are_put_together(place, monkeypatch):
    monkeypatch.setattr(gather, "COPY_BELOW", 1)
    made = place.make(300)
    real = os.preadv

    def stingy(fd, views, offset):
        return real(fd, [views[0][:7]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stingy)
        written = place.write(made)
    place.verify(made, written)


@pytest.mark.parametrize(
    "change",
    [
        {"rid": RequestId.sample("abcd", 8, 1, 37)},
        {"input_ids": None},
        {"capture_layers": (1, 3, 6)},
        {"dtype": "float16"},
        {"final_norm": "pre"},
    ],
)
def test_another_samples_dump_is_refused(place, change):
    made = place.make()
    if "input_ids" in change:
        ids = made.sample.input_ids[:]
        ids[5] += 1
        change = {"input_ids": ids}
    with made.opened() as dump, pytest.raises(DumpRejectedError):
        place.sink().write(dump, replace(made.sample, **change), ignore)
    assert place.files() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_trouble_of_the_output_passes_unharmed_and_leaves_nothing(place, monkeypatch, code, at):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
    made = place.make(300)
    real = os.pwrite
    calls = iter(range(10_000))

    def failing(fd, data, offset):
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError) as caught:
            place.write(made)
    assert caught.value.errno == code
    assert place.files() == []
    place.verify(made, place.write(made))  # and the same sink's folder takes it the next time


@pytest.mark.parametrize("step", ["fdatasync", "fsync", "ftruncate", "link"])
def test_trouble_at_the_last_steps_passes_unharmed(place, monkeypatch, step):
    made = place.make()
    (place.out / "rows_0-2000").mkdir()

    def failing(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(OSError) as caught:
            place.write(made)
    assert caught.value.errno == errno.EIO
    # after the link only durability is in doubt: the file is whole, and the next attempt takes it as it is
    assert place.files() == (["rows_0-2000/data_7.ckpt"] if step == "fsync" else [])
    written = place.write(made)
    assert written.adopted is (step == "fsync")
    place.verify(made, written)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_passes_as_enospc_and_leaves_nothing(place, monkeypatch, reserves):
    if not reserves:  # it is noticed in the middle then
        monkeypatch.setattr("hsjournal.sink.stream.reserve", lambda _fd, _nbytes: None)
    made = place.make(2000, hidden=576)
    small = place.out
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(OSError) as caught:
            place.write(made)
        assert caught.value.errno == errno.ENOSPC
        assert place.files() == []
        assert os.statvfs(small).f_bavail * 4096 > (2 << 20) - 65536  # and its blocks are free again
        fitting = place.make(300, row=8)
        written = place.write(fitting)
        assert place.verify(fitting, written) == "memory"
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_room_is_asked_for_before_the_first_byte_and_given_back_where_it_was_too_much(place, monkeypatch):
    made, real, asked = place.make(2000, hidden=576), reserve.reserve, []

    def twice(fd, nbytes):
        assert os.fstat(fd).st_size == 0
        real(fd, 2 * nbytes)
        asked.append((nbytes, os.fstat(fd).st_blocks * 512))

    monkeypatch.setattr("hsjournal.sink.stream.reserve", twice)
    written = place.write(made)
    ((nbytes, allocated),) = asked
    assert 4 * 2000 * 576 * 2 <= nbytes <= written.nbytes
    assert allocated >= 2 * nbytes
    assert os.stat(place.out / written.path).st_blocks * 512 < written.nbytes + 65536
    place.verify(made, written)


@pytest.mark.parametrize(("code", "passes"), [(errno.EOPNOTSUPP, True), (errno.ENOSPC, False), (errno.EDQUOT, False)])
def test_a_storage_that_can_not_reserve_takes_the_file_all_the_same(place, monkeypatch, code, passes):
    class Libc:
        @staticmethod
        def fallocate64(*_):
            ctypes.set_errno(code)
            return -1

    made = place.make(2000, hidden=576)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
        if passes:
            place.verify(made, place.write(made))
            return
        with pytest.raises(OSError) as caught:
            place.write(made)
    assert caught.value.errno == code
    assert place.files() == []


def test_a_block_is_written_while_another_is_and_while_the_next_is_filled(place, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
    made, real, later = place.make(300), os.pwrite, threading.Event()

    def first_waits(fd, data, offset):
        if offset:
            later.set()
        else:
            assert later.wait(10), "nothing else was written meanwhile"
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", first_waits)
    place.verify(made, place.write(made))


def test_short_writes_go_on_from_an_aligned_place(place, monkeypatch):
    made = place.make(300)
    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwrite", lambda fd, data, offset: real(fd, data[:4096], offset) - (100 if len(data) > 4096 else 0)
        )
        written = place.write(made)
    place.verify(made, written)


def test_without_o_direct_the_file_is_the_same(place, monkeypatch):
    made = place.make(700, hidden=576)
    first = place.write(made)
    (place.out / first.path).unlink()
    real_open, real_write, real_fcntl = os.open, os.pwrite, fcntl.fcntl

    def no_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags, *args, **kwargs)

    def no_direct_later(fd, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_fcntl(fd, command, argument)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_direct)
        patch.setattr(fcntl, "fcntl", no_direct_later)
        second = place.write(made)
        assert place.verify(made, second) == "dropped"
    assert second == first
    (place.out / first.path).unlink()
    refused = []

    def refused_at_writing(fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "not so aligned")
        return real_write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refused_at_writing)
        third = place.write(made)
    assert refused
    assert third == first
    place.verify(made, third)


def test_bytes_do_not_depend_on_the_place_of_the_file(place, tmp_path):
    made = place.make()
    other = Place(tmp_path / "other")
    other.base.mkdir()
    again = other.make()
    assert other.write(again) == place.write(made)


def test_several_threads_write_through_one_sink(place):
    made = [place.make(200 + row, row=row, seed=row, hidden=576) for row in range(12)]
    sink = place.sink()
    written = {}

    def work(mine) -> None:
        for m in mine:
            with m.opened() as dump:
                written[m.sample.row] = sink.write(dump, m.sample, ignore)

    threads = [threading.Thread(target=work, args=(made[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    for m in made:
        place.verify(m, written[m.sample.row])


def test_progress_comes_before_each_step_and_never_falls(place, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
    made = place.make(300)
    seen: list[tuple[str, int]] = []
    with made.opened() as dump:
        written = place.sink().write(dump, made.sample, lambda phase, nbytes: seen.append((phase, nbytes)))
    phases = list(dict.fromkeys(phase for phase, _ in seen))
    assert phases == ["opening", "writing", "syncing", "publishing"]
    marks = [nbytes for phase, nbytes in seen if phase == "writing"]
    assert marks == sorted(marks)
    assert len(marks) >= written.nbytes // 8192 - 4
    assert seen[-1] == ("publishing", written.nbytes)


def test_memory_does_not_grow_with_the_sample(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from tests.helpers.sinks import Place
place = Place(Path(sys.argv[1]))
small, large = place.make(40, hidden=7168, row=1), place.make(6000, hidden=2048, row=2)
large.dump.arrays.clear()
import gc; gc.collect()
place.write(small)
Path("/proc/self/clear_refs").write_text("5")
before = int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1])
place.verify(large, place.write(large))
peak = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
print(peak - before)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 * 1024  # KiB, for 98 MB


def test_a_fenced_worker_publishes_nothing(place):
    def fence() -> None:
        raise FencedError("a newer worker owns the run")

    made = place.make()
    with made.opened() as dump, pytest.raises(FencedError):
        place.sink(fence=fence).write(dump, made.sample, ignore)
    assert place.files() == []


def test_the_output_folder_is_not_made_again_when_it_is_gone(place):
    made = place.make()
    place.out.rmdir()
    gone = place.base / "out"
    from hsjournal.sink.stream import Sink
    from tests.helpers.sinks import SPECFORGE

    with made.opened() as dump, pytest.raises(FileNotFoundError):
        Sink(gone, SPECFORGE, place.rejects).write(dump, made.sample, ignore)
    assert not gone.exists()


def test_the_sink_runs_without_torch():
    program = "import sys, hsjournal.sink.stream, hsjournal.sink.verify, hsjournal.dump.watch, hsjournal.dump.reap; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("point", ["sink.opened", "sink.writing", "sink.written", "sink.synced"])
def test_an_error_at_any_step_before_the_link_leaves_nothing_open_and_nothing_behind(place, monkeypatch, point):
    made = place.make()

    def failing(name, row=None):
        if name == point:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", failing)
        with pytest.raises(OSError) as caught:
            place.write(made)
    assert caught.value.errno == errno.ENOSPC
    assert place.files() == []


def test_armed_fault_points_of_the_sink_are_all_passed(place, monkeypatch):
    passed: list[str] = []
    monkeypatch.setattr(faults, "point", lambda name, row=None: passed.append(name))
    made = place.make()
    place.verify(made, place.write(made))
    assert list(dict.fromkeys(passed)) == [
        "sink.opened",
        "sink.writing",
        "sink.written",
        "sink.synced",
        "sink.linking",
        "sink.linked",
        "sink.published",
        "verify.reading",
        "verify.done",
    ]
    assert bits_of(torch.load(place.out / "rows_0-2000/data_7.ckpt", weights_only=True)["hidden_state"]).shape == (
        37,
        64,
    )
