from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hsjournal import faults
from hsjournal.capture.writer import CaptureError, CaptureSettings, DumpWriter, DuplicateDumpError
from hsjournal.dump.protocol import CaptureFailure, FailureReason, Meta, RequestId, token_ids_sha256
from hsjournal.errors import UsageError

HIDDEN = 8
RID = RequestId.sample("abcd", row=3, attempt=1, tokens=4)
IDS = [5, 6, 7, 8]


def settings(root: Path, **changes: object) -> CaptureSettings:
    values: dict[str, object] = {
        "root": root,
        "capture_layers": (1, 3),
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "final_norm": "post",
        "boot_id": "boot-1",
        "engine": "embedded",
        "versions": {"torch": "0"},
        "room_wait_s": 0.3,
    }
    return CaptureSettings(**(values | changes))  # type: ignore[arg-type]


def rows(tensor: int, tokens: int, hidden: int = HIDDEN) -> bytes:
    return bytes((tensor * 50 + i) % 251 for i in range(tokens * hidden * 4))


def write_all(writer: DumpWriter, rid: RequestId = RID, ids: list[int] = IDS) -> bool:
    dump = writer.begin(rid)
    for index in range(3):
        dump.write_rows(index, 0, memoryview(rows(index, rid.tokens, writer.settings.hidden_size)))
    return dump.commit(ids)


def failure(root: Path, rid: RequestId = RID) -> CaptureFailure:
    assert sorted(os.listdir(root / str(rid))) == ["error"]
    return CaptureFailure.from_json((root / str(rid) / "error").read_bytes())


@contextmanager
def tmpfs(mount: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def writer(root: Path) -> Iterator[DumpWriter]:
    made = DumpWriter(settings(root))
    yield made
    made.close()


def test_publishes_one_directory_with_all_files_and_nothing_else(root: Path, writer: DumpWriter) -> None:
    assert write_all(writer)
    assert os.listdir(root) == [str(RID)]
    folder = root / str(RID)
    assert sorted(os.listdir(folder)) == ["aux_0.bin", "aux_1.bin", "done", "final.bin", "meta.json"]
    for index, name in enumerate(("aux_0", "aux_1", "final")):
        assert (folder / f"{name}.bin").read_bytes() == rows(index, 4)
    meta = Meta.from_json((folder / "meta.json").read_bytes())
    assert (meta.rid, meta.num_tokens, meta.capture_layers) == (str(RID), 4, (1, 3))
    assert (meta.boot_id, meta.chunks, meta.final_norm) == ("boot-1", (0,), "post")
    assert meta.token_ids_sha256 == token_ids_sha256(IDS)


def test_nothing_is_visible_before_the_commit(root: Path, writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    dump.write_rows(0, 0, memoryview(rows(0, 4)))
    assert os.listdir(root) == [f".tmp-{RID}"]
    dump.discard()
    assert os.listdir(root) == []


def test_threads_write_chunks_at_row_offsets_in_any_order(root: Path, writer: DumpWriter) -> None:
    rid = RequestId.sample("abcd", row=0, attempt=1, tokens=64)
    content = [rows(index, 64) for index in range(3)]
    dump = writer.begin(rid)
    jobs = [(index, start) for start in range(48, -1, -16) for index in range(3)]
    size = HIDDEN * 4

    def write(index: int, start: int) -> None:
        dump.write_rows(index, start, memoryview(content[index])[start * size : (start + 16) * size])

    threads = [threading.Thread(target=write, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dump.commit(list(range(64)), chunks=(0, 16, 32, 48))
    assert [(root / str(rid) / f"{n}.bin").read_bytes() for n in ("aux_0", "aux_1", "final")] == content
    assert Meta.from_json((root / str(rid) / "meta.json").read_bytes()).chunks == (0, 16, 32, 48)


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_row_that_never_came_is_not_published(root: Path, writer: DumpWriter, missing: int) -> None:
    size = HIDDEN * 4
    dump = writer.begin(RID)
    for index in range(3):
        for row in range(4):
            if (index, row) != (1, missing):
                dump.write_rows(index, row, memoryview(rows(index, 4))[row * size : (row + 1) * size])
    with pytest.raises(CaptureError, match=f"row {missing} of aux_1") as caught:
        dump.commit(IDS)
    assert dump.fail(caught.value.reason, caught.value.detail)
    assert failure(root).reason is FailureReason.MISMATCH


def test_rows_past_the_promised_count_are_refused_not_trimmed(writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    with pytest.raises(CaptureError) as caught:
        dump.write_rows(0, 2, memoryview(rows(0, 3)))
    assert caught.value.reason is FailureReason.MISMATCH
    dump.discard()


def test_other_token_count_than_promised_is_a_mismatch(writer: DumpWriter) -> None:
    with pytest.raises(CaptureError) as caught:
        write_all(writer, ids=[1, 2, 3])
    assert caught.value.reason is FailureReason.MISMATCH


def test_fail_publishes_the_reason_alone(root: Path, writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    dump.write_rows(0, 0, memoryview(rows(0, 4)))
    assert dump.fail(FailureReason.PREFIX_HIT, "3 tokens came from the cache")
    got = failure(root)
    assert (got.rid, got.reason, got.detail) == (str(RID), FailureReason.PREFIX_HIT, "3 tokens came from the cache")
    assert got.boot_id == "boot-1"


def test_publish_failure_needs_no_open_dump(root: Path, writer: DumpWriter) -> None:
    assert writer.publish_failure(RID, FailureReason.MISMATCH, "why")
    assert failure(root).reason is FailureReason.MISMATCH


def test_the_first_dump_of_a_request_id_is_kept(root: Path, writer: DumpWriter) -> None:
    write_all(writer)
    before = (root / str(RID)).stat().st_ino
    with pytest.raises(DuplicateDumpError):
        writer.begin(RID)
    assert not writer.publish_failure(RID, FailureReason.INTERNAL, "late")
    assert (root / str(RID)).stat().st_ino == before
    assert os.listdir(root) == [str(RID)]


def test_a_dump_that_appears_while_ours_is_written_is_kept(root: Path, writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    for index in range(3):
        dump.write_rows(index, 0, memoryview(rows(index, 4)))
    (root / str(RID)).mkdir()
    (root / str(RID) / "done").touch()
    assert dump.commit(IDS) is False
    assert os.listdir(root) == [str(RID)]
    assert os.listdir(root / str(RID)) == ["done"]


def test_the_same_request_id_twice_at_once_is_a_duplicate(writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    with pytest.raises(DuplicateDumpError):
        writer.begin(RID)
    dump.discard()
    assert write_all(writer)


def test_a_root_deleted_underneath_is_made_again(root: Path, writer: DumpWriter) -> None:
    shutil.rmtree(root)
    assert write_all(writer)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_dump_whose_root_is_deleted_becomes_an_error_in_the_new_root(root: Path, writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    dump.write_rows(0, 0, memoryview(rows(0, 4)))
    shutil.rmtree(root)
    with pytest.raises(CaptureError) as caught:
        dump.write_rows(1, 0, memoryview(rows(1, 4)))
    assert dump.fail(caught.value.reason, caught.value.detail)
    assert failure(root).reason is FailureReason.INTERNAL


def test_a_root_moved_away_before_the_commit_is_noticed(root: Path, writer: DumpWriter, tmp_path: Path) -> None:
    dump = writer.begin(RID)
    for index in range(3):
        dump.write_rows(index, 0, memoryview(rows(index, 4)))
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(CaptureError) as caught:
        dump.commit(IDS)
    assert dump.fail(caught.value.reason, caught.value.detail)
    assert failure(root).reason is FailureReason.INTERNAL
    assert [n for n in os.listdir(tmp_path / "elsewhere") if not n.startswith(".tmp-")] == []


def test_close_leaves_no_unfinished_folder_and_refuses_new_dumps(root: Path, writer: DumpWriter) -> None:
    dump = writer.begin(RID)
    dump.write_rows(0, 0, memoryview(rows(0, 4)))
    writer.close()
    assert os.listdir(root) == []
    with pytest.raises(CaptureError) as caught:
        dump.write_rows(1, 0, memoryview(rows(1, 4)))
    assert caught.value.reason is FailureReason.ABORTED
    with pytest.raises(CaptureError):
        writer.begin(RID)
    assert os.listdir(root) == []


def test_start_removes_unfinished_folders_of_the_dead_and_nothing_else(root: Path) -> None:
    root.mkdir(mode=0o700)
    dead, alive = RequestId.sample("abcd", 1, 1, 5), RequestId.sample("abcd", 2, 1, 5)
    other = DumpWriter(settings(root, boot_id="another living server"))
    living = other.begin(alive)
    (root / f".tmp-{dead}").mkdir()
    (root / f".tmp-{dead}" / "aux_0.bin").write_bytes(b"x")
    published = RequestId.sample("abcd", 4, 1, 5)
    kept = {f".tmp-{alive}", ".tmp-hsj-../evil".replace("/", "_"), "psm_x", str(published)}
    for name in kept - {f".tmp-{alive}"}:
        (root / name).mkdir()
    with_folder = RequestId.sample("abcd", 5, 1, 5)
    (root / f".tmp-{with_folder}" / "inside").mkdir(parents=True)
    target = root.parent / "target"
    target.mkdir()
    (target / "precious").touch()
    (root / f".tmp-{RequestId.sample('abcd', 6, 1, 5)}").symlink_to(target)

    DumpWriter(settings(root))

    left = set(os.listdir(root))
    assert f".tmp-{dead}" not in left
    assert kept <= left
    assert os.listdir(target) == ["precious"]
    living.discard()


def test_a_folder_that_a_killed_process_locked_is_free(root: Path) -> None:
    root.mkdir(mode=0o700)
    folder = root / f".tmp-{RID}"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    DumpWriter(settings(root))
    assert folder.exists()
    os.close(fd)
    DumpWriter(settings(root))
    assert not folder.exists()


def test_somebody_who_looks_whether_a_new_folder_is_abandoned_is_waited_for(
    root: Path, writer: DumpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def looked_at(fd: int, kind: int) -> None:
        monkeypatch.undo()
        looker = os.open(root / f".tmp-{RID}", os.O_RDONLY)
        real(looker, fcntl.LOCK_SH)
        threading.Timer(0.1, os.close, [looker]).start()
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    assert write_all(writer)


def test_modes_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer = DumpWriter(settings(tmp_path / "a" / "root"))
        write_all(writer)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "root").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "root" / str(RID)).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "root" / str(RID) / "final.bin").stat().st_mode) == 0o600


def test_group_mode_lets_the_group_read_and_delete(root: Path) -> None:
    before = os.umask(0o077)
    try:
        write_all(DumpWriter(settings(root, group_mode=True)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o2770
    assert stat.S_IMODE((root / str(RID)).stat().st_mode) & 0o777 == 0o770
    for file in (root / str(RID)).iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o660


def test_a_linked_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="link"):
        DumpWriter(settings(tmp_path / "link"))


def test_a_file_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a folder"):
        DumpWriter(settings(tmp_path / "file"))


def test_a_root_open_to_everyone_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UsageError, match="Everyone"):
        DumpWriter(settings(root))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_another_users_root_is_refused(root: Path) -> None:
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        DumpWriter(settings(root))


def test_short_writes_are_completed(root: Path, writer: DumpWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:7], at))
    assert write_all(writer)
    assert (root / str(RID) / "final.bin").read_bytes() == rows(2, 4)


@pytest.mark.parametrize("point", ["capture.writing", "capture.publishing"])
def test_a_shortage_that_ends_in_time_costs_nothing(
    root: Path, writer: DumpWriter, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    left = [3]

    def full(name: str, *_: object) -> None:
        if name == point and left[0]:
            left[0] -= 1
            raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(faults, "point", full)
    assert write_all(writer)
    assert left == [0]


@pytest.mark.root
def test_a_full_root_ends_in_no_room_and_frees_what_it_took(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=256k") as mount:
        writer = DumpWriter(settings(mount / "root", hidden_size=1024))
        rid = RequestId.sample("abcd", 1, 1, 40)  # 3 tensors of 160 KiB
        dump = writer.begin(rid)
        dump.write_rows(0, 0, memoryview(rows(0, 40, 1024)))
        with pytest.raises(CaptureError) as caught:
            dump.write_rows(1, 0, memoryview(rows(1, 40, 1024)))
        assert caught.value.reason is FailureReason.NO_ROOM
        assert dump.fail(caught.value.reason, caught.value.detail)
        assert failure(mount / "root", rid).reason is FailureReason.NO_ROOM
        assert write_all(writer, RequestId.sample("abcd", 2, 1, 4), IDS), "the next one that fits is published"
        writer.close()
        writer.root.close()


@pytest.mark.root
def test_an_error_is_published_when_nearly_nothing_is_left(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=128k") as mount:
        writer = DumpWriter(settings(mount / "root", hidden_size=1024))
        (mount / "filler").write_bytes(b"x" * (31 * 4096))  # one page left: of 32
        rid = RequestId.sample("abcd", 1, 1, 4)
        with pytest.raises(CaptureError) as caught:
            write_all(writer, rid)
        assert caught.value.reason is FailureReason.NO_ROOM
        # As the engine does it, with the dump still open: its one page is freed for the error.
        next(iter(writer._open)).fail(caught.value.reason, caught.value.detail)
        assert failure(mount / "root", rid).reason is FailureReason.NO_ROOM
        writer.close()
        writer.root.close()


@pytest.mark.root
def test_a_root_without_a_single_inode_left_says_so_and_lives(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=1m,nr_inodes=4") as mount:
        writer = DumpWriter(settings(mount / "root"))
        for number in range(2):
            (mount / f"filler{number}").touch()
        with pytest.raises(CaptureError) as caught:
            writer.begin(RID)
        assert caught.value.reason is FailureReason.NO_ROOM
        assert not writer.publish_failure(RID, caught.value.reason, caught.value.detail)
        for number in range(2):
            (mount / f"filler{number}").unlink()
        assert writer.publish_failure(RID, FailureReason.NO_ROOM, "now")
        writer.close()
        writer.root.close()


@pytest.mark.parametrize("ending", ["discard", "fail"])
def test_a_server_on_its_way_out_takes_no_dump_back_that_it_has_just_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Found by the kill drill: the dump was published, and emptied by the closing writer before its commit returned."""
    writer = DumpWriter(settings(tmp_path / "root"))
    dump = writer.begin(RID)
    for index in range(3):
        dump.write_rows(index, 0, memoryview(rows(index, RID.tokens)))
    end = (lambda: dump.fail(FailureReason.ABORTED, "the server ends")) if ending == "fail" else dump.discard
    closer = threading.Thread(target=end)
    rename = os.rename

    def rename_then_end(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        closer.start()
        closer.join(0.2)  # it waits for the commit to let go of the dump, and then comes before it

    monkeypatch.setattr("os.rename", rename_then_end)
    assert dump.commit(IDS)
    closer.join(5)
    assert {"done", "meta.json", "final.bin"} <= set(os.listdir(tmp_path / "root" / str(RID)))
    dump.discard()
    assert "done" in os.listdir(tmp_path / "root" / str(RID))
