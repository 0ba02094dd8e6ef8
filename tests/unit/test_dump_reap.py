from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hsjournal.dump import reap
from hsjournal.dump.protocol import RequestId
from hsjournal.dump.reader import list_root, open_root
from tests.helpers.dumps import random_ids, write_dump

RID = RequestId.sample("abcd", 3, 1, 7)
IDS = random_ids(7)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def root_fd(root):
    fd = open_root(root)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("publish", [True, False])
def test_a_dump_of_ours_goes_and_its_bytes_are_told(root, root_fd, publish):
    made = write_dump(root, RID, IDS, publish=publish)
    size = sum(f.stat().st_size for f in made.path.iterdir())
    assert reap.remove_dump(root_fd, made.path.name) == size
    assert list(root.iterdir()) == []
    assert reap.remove_dump(root_fd, made.path.name) == 0  # again: nothing to do


@pytest.mark.parametrize(
    "name",
    ["psm_1", "req_22391", "..", ".", "", "../root", "hsj-abcd-3-1-7/../x", ".tmp-x", ".tmp-.tmp-hsj-abcd-3-1-7"],
)
def test_foreign_names_are_never_touched(root, root_fd, name):
    (root / "psm_1").touch()
    (root / "req_22391").mkdir()
    for act in (lambda: reap.remove_dump(root_fd, name), lambda: reap.set_aside(root_fd, name, root / "rejects")):
        with pytest.raises(ValueError, match="not a dump of ours"):
            act()
    assert sorted(p.name for p in root.iterdir()) == ["psm_1", "req_22391"]


def test_another_runs_dump_stays(root, root_fd):
    made = write_dump(root, RID, IDS)
    with pytest.raises(ValueError, match="not a dump of ours"):
        reap.remove_dump(root_fd, made.path.name, run="other")
    assert len(list(made.path.iterdir())) == 6


def test_a_link_in_place_of_a_dump_is_not_followed(root, root_fd, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    made = write_dump(other, RID, IDS)
    (root / str(RID)).symlink_to(made.path)
    with pytest.raises(OSError) as caught:
        reap.remove_dump(root_fd, str(RID))
    assert caught.value.errno in (errno.ENOTDIR, errno.ELOOP)
    assert len(list(made.path.iterdir())) == 6


def test_links_and_folders_inside_stay_and_the_rest_goes(root, root_fd, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")

    def edit(tmp: Path) -> None:
        (tmp / "link").symlink_to(precious)
        (tmp / "sub").mkdir()

    made = write_dump(root, RID, IDS, edit=edit)
    with pytest.raises(OSError) as caught:
        reap.remove_dump(root_fd, str(RID))
    assert caught.value.errno == errno.ENOTEMPTY
    assert "link" in str(caught.value)
    assert sorted(p.name for p in made.path.iterdir()) == ["link", "sub"]
    assert precious.read_text() == "x"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY, errno.EIO])
def test_a_deletion_that_fails_half_way_is_finished_by_the_next_one(root, root_fd, monkeypatch, code):
    made = write_dump(root, RID, IDS)
    real = os.unlink

    def stubborn(name, **kwargs):
        if name == "aux_1.bin":
            raise OSError(code, os.strerror(code), name)
        real(name, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", stubborn)
        with pytest.raises(OSError) as caught:
            reap.remove_dump(root_fd, str(RID))
        assert caught.value.errno == code
    assert [p.name for p in made.path.iterdir()] == ["aux_1.bin"]
    assert [e.kind for e in list_root(root_fd)] == ["partial"]  # never again taken for a dump
    assert reap.remove_dump(root_fd, str(RID)) > 0
    assert list(root.iterdir()) == []


def test_done_goes_first_and_meta_last(root, root_fd, monkeypatch):
    write_dump(root, RID, IDS)
    order: list[str] = []
    real = os.unlink

    def noted(name, **kwargs):
        order.append(name)
        real(name, **kwargs)

    monkeypatch.setattr(os, "unlink", noted)
    reap.remove_dump(root_fd, str(RID))
    assert order[0] == "done"
    assert order[-1] == "meta.json"


def test_rejects_are_kept_aside_and_only_the_last_few(root, root_fd, tmp_path):
    rejects = tmp_path / "run" / "rejects"
    (tmp_path / "run").mkdir()
    rejects.mkdir()
    (rejects / "notes").mkdir()  # a person's, not ours
    for row in range(7):
        rid = RequestId.sample("abcd", row, 1, 7)
        made = write_dump(root, rid, IDS, seed=row)
        result = reap.set_aside(root_fd, str(rid), rejects, keep=3, why="wrong_count: 6 of 7")
        assert result.problem is None
        assert result.kept is not None
        assert (result.kept / "final.bin").read_bytes() == made.final.tobytes()
        assert (result.kept / "meta.json").read_bytes() == made.meta.to_json()
        assert (result.kept / "why.txt").read_text() == "wrong_count: 6 of 7\n"
    assert list(root.iterdir()) == []
    assert sorted(p.name for p in rejects.iterdir()) == [*(f"{n:06d}-hsj-abcd-{n - 1}-1-7" for n in (5, 6, 7)), "notes"]


def test_large_tensors_are_not_kept(root, root_fd, tmp_path, monkeypatch):
    monkeypatch.setattr(reap, "_KEEP_BELOW", 1000)
    write_dump(root, RID, IDS)
    result = reap.set_aside(root_fd, str(RID), tmp_path / "rejects")
    assert result.kept is not None
    assert sorted(p.name for p in result.kept.iterdir()) == ["meta.json", "why.txt"]


def test_links_in_a_reject_are_not_read(root, root_fd, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")

    def edit(tmp: Path) -> None:
        (tmp / "final.bin").unlink()
        (tmp / "final.bin").symlink_to(secret)

    write_dump(root, RID, IDS, edit=edit)
    with pytest.raises(OSError):
        reap.set_aside(root_fd, str(RID), tmp_path / "rejects")
    assert not any("final.bin" in str(p) for p in (tmp_path / "rejects").rglob("*"))
    assert secret.exists()


def test_a_reject_that_cannot_be_kept_is_removed_all_the_same(root, root_fd, tmp_path):
    (tmp_path / "rejects").write_text("in the way")
    write_dump(root, RID, IDS)
    result = reap.set_aside(root_fd, str(RID), tmp_path / "rejects")
    assert result.kept is None
    assert result.problem is not None
    assert result.freed > 0
    assert list(root.iterdir()) == []


def test_an_unpublished_folder_whose_writer_lives_stays(root, root_fd):
    made = write_dump(root, RID, IDS, publish=False)
    writer = os.open(made.path, os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)
    assert reap.remove_dump(root_fd, made.path.name) == 0
    assert len(list(made.path.iterdir())) == 6
    os.close(writer)
    assert reap.remove_dump(root_fd, made.path.name) > 0
    assert list(root.iterdir()) == []


def test_a_dump_published_while_it_is_looked_at_stays(root, root_fd, monkeypatch):
    """The writer publishes and lets go between the opening and the lock, which is then one on a finished dump."""
    made = write_dump(root, RID, IDS, publish=False)
    real = fcntl.flock

    def publish_first(fd: int, kind: int) -> None:
        made.path.rename(root / str(RID))
        monkeypatch.undo()
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", publish_first)
    assert reap.remove_dump(root_fd, made.path.name) == 0
    assert len(list((root / str(RID)).iterdir())) == 6
