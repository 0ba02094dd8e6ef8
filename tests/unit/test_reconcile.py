"""Reconciling a real journal with a real hand-over root."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hsjournal.config import Manifest
from hsjournal.dump import reader
from hsjournal.dump.protocol import CaptureFailure, FailureReason, RequestId
from hsjournal.dump.reader import open_root
from hsjournal.errors import FencedError, Reject
from hsjournal.events import Event
from hsjournal.journal.store import Journal, Move
from hsjournal.reconcile.apply import apply
from hsjournal.reconcile.gather import gather
from hsjournal.reconcile.plan import Plan, plan
from hsjournal.states import Actor, State, Transition
from tests.helpers.dumps import write_dump, write_failure
from tests.helpers.journals import FILE, RUN, put, started

MANIFEST = Manifest(
    run_id=RUN, created="", version="", model="m", model_sha256="", tokenizer_sha256="", hidden_size=64, num_layers=8,
    vocab_size=1000, context_length=4096, capture_layers=(1, 3, 5), dtype="bfloat16", final_norm="post",
    format="specforge", out_dir="/nowhere", engine="embedded", chunk_size=0,
)  # fmt: skip
LENGTHS = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


class Scene:
    """A run with ten rows, its hand-over root, and what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.path, self.epoch = started(folder, LENGTHS)
        self.journal = Journal(self.path)
        self.root = folder / "root"
        self.root.mkdir()
        self.fd = open_root(self.root)
        self.rejects = folder / "rejects"
        self.out = folder / "out"
        self.out.mkdir()
        self.events: list[Event] = []

    def close(self) -> None:
        self.journal.close()
        os.close(self.fd)

    def rid(self, row: int, attempt: int = 1) -> RequestId:
        return RequestId.sample(RUN, row, attempt, LENGTHS[row])

    def put(self, row: int, state: State, **columns: object) -> None:
        put(self.journal, row, state, self.epoch, **columns)

    def dump(self, row: int, attempt: int = 1, **options: object) -> None:
        ids = self.journal.claim_of(row).input_ids
        write_dump(self.root, self.rid(row, attempt), list(ids), **options)  # type: ignore[arg-type]

    def plan(self, **options: object) -> Plan:
        return plan(gather(self.journal, [self.fd], MANIFEST, max_strikes=3, **options))  # type: ignore[arg-type]

    def reconcile(self, **options: object) -> Plan:
        made = self.plan(**options)
        apply(made, self.journal, self.epoch, [self.fd], self.rejects, self.out, self.events.append)
        return made

    def states(self) -> dict[int, str]:
        return {r["row"]: r["state"] for r in self.journal.all_rows() if r["state"] != "pending"}

    def names(self) -> set[str]:
        return {p.name for p in self.root.iterdir()}


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    yield made
    made.close()


def everything(scene: Scene) -> None:
    """Each kind of thing that may lie there after a bad night."""
    scene.put(0, State.SENT)
    scene.dump(0)  # complete, unread
    scene.put(1, State.SENT)  # nothing came
    scene.put(2, State.DUMPED)
    scene.dump(2)
    scene.put(3, State.DUMPED)  # its dump is gone
    scene.put(4, State.VERIFIED)
    scene.dump(4)  # the deletion was missed
    scene.put(5, State.SENT)
    scene.dump(5, num_tokens=8)  # a row short
    scene.put(6, State.SENT)
    write_failure(scene.root, scene.rid(6), CaptureFailure(str(scene.rid(6)), FailureReason.INTERNAL, "oops", "b"))
    scene.put(7, State.WRITTEN)
    scene.dump(7)
    scene.put(8, State.SENT)
    scene.dump(8, publish=False)  # half-written by a server that died
    scene.dump(9, attempt=3)  # of a row that was never sent
    write_dump(scene.root, RequestId.for_probe(RUN, 1, 4), [1, 2, 3, 4])
    write_dump(scene.root, RequestId.sample("other999", 0, 1, 4), [1, 2, 3, 4])
    (scene.root / "psm_x").write_bytes(b"x")
    (scene.root / "req_22391").mkdir()
    (scene.root / "link").symlink_to("/etc")


def test_after_a_bad_night_everything_is_where_it_belongs_and_twice_changes_nothing(scene):
    everything(scene)
    foreign = {"psm_x", "req_22391", "link", "hsj-other999-0-1-4"}
    before = {name: (scene.root / name).lstat().st_ino for name in foreign}
    made = scene.reconcile()
    assert scene.states() == {0: "dumped", 2: "dumped", 4: "verified", 7: "written"}
    assert scene.names() == foreign | {str(scene.rid(row)) for row in (0, 2, 7)}
    assert {name: (scene.root / name).lstat().st_ino for name in foreign} == before
    assert set(made.foreign) == foreign
    assert (scene.journal.rows_of([5])[0]["strikes"], scene.journal.rows_of([1])[0]["strikes"]) == (1, 0)
    assert scene.journal.rows_of([5])[0]["reason"].startswith("wrong_count")
    assert [p.name for p in scene.rejects.iterdir()]
    kinds = [e.kind for e in scene.events]
    assert kinds == ["dump_removed"] * len(made.removals)
    moves = [e.row for _, e in scene.journal.events() if e.kind == "reconciled"]
    assert moves == [0, 1, 3, 5, 6, 8]

    after = (scene.states(), scene.names(), scene.journal.events())
    again = scene.reconcile()
    assert again.is_empty
    assert (scene.states(), scene.names(), scene.journal.events()) == after


def test_a_look_changes_nothing(scene):
    everything(scene)
    before = (scene.states(), scene.names())
    lines = list(scene.plan().lines())
    assert (scene.states(), scene.names()) == before
    for words in (
        "row 0: sent -> dumped (complete dump found)",
        f"remove {scene.rid(4)}: its row is verified",
        f"keep {scene.rid(2)}: a usable dump",
        "leave psm_x: not ours",
    ):
        assert words in lines


@pytest.mark.parametrize("kill_at", range(1, 13))
def test_killed_between_any_two_steps_the_next_one_goes_on(tmp_path, kill_at):
    scene = Scene(tmp_path)
    everything(scene)
    scene.close()
    code = f"""
        from pathlib import Path
        from tests.unit.test_reconcile import Scene, MANIFEST
        from hsjournal.reconcile import apply as module
        from hsjournal.journal.store import Journal
        from hsjournal.dump.reader import open_root
        scene = object.__new__(Scene)
        folder = Path({str(tmp_path)!r})
        scene.journal, scene.fd, scene.epoch = Journal(folder / "journal.db"), open_root(folder / "root"), 1
        scene.rejects, scene.out, scene.events = folder / "rejects", folder / "out", []
        module.MOVES_PER_COMMIT = 1
        scene.reconcile()
    """
    environment = os.environ | {"HSJOURNAL_FAULTS": f"reconcile.applying=kill@{kill_at}"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, env=environment)
    assert done.returncode == -9
    scene.journal, scene.fd = Journal(scene.path), open_root(scene.root)
    try:
        scene.reconcile()
        assert scene.states() == {0: "dumped", 2: "dumped", 4: "verified", 7: "written"}
        assert scene.plan().is_empty
        assert scene.journal.rows_of([5])[0]["strikes"] == 1, "a strike counts once"
    finally:
        scene.close()


def test_what_a_living_server_works_on_is_awaited(scene):
    scene.put(0, State.SENT, boot_id="alive")
    scene.put(1, State.SENT, boot_id="alive")
    scene.put(2, State.SENT, boot_id="of before")
    scene.dump(0, publish=False)
    with locked(scene.root / f".tmp-{scene.rid(0)}"):
        made = scene.reconcile(lives={"alive": frozenset({str(scene.rid(0))})})
        assert made.awaited == (0,)
        assert scene.states() == {0: "sent"}
        assert scene.names() == {f".tmp-{scene.rid(0)}"}, "a writer fills it"
    assert scene.plan(lives={"alive": None}).awaited == (0,)
    assert scene.plan(lives={}).awaited == ()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As a writer holds the folder that it fills."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_a_late_dump_of_a_row_that_was_given_up_is_taken_and_not_asked_for_again(scene):
    """The connection broke or the time ran out, the row went back, and then the dump came after all (G10)."""
    scene.put(0, State.SENT)
    back = Transition(State.SENT, State.PENDING, Actor.RECONCILE, "")
    scene.journal.apply([Move(0, 1, back, {"reason": "the server could not be reached"})], 1)
    scene.dump(0)
    scene.dump(1)  # attempt 1 of a row whose attempt is 0: never sent by this journal
    scene.reconcile()
    assert scene.states() == {0: "dumped"}
    assert scene.names() == {str(scene.rid(0))}
    assert scene.journal.rows_of([0])[0]["attempt"] == 1


def test_but_not_one_that_was_refused_already(scene):
    scene.put(0, State.SENT)
    back = Transition(State.SENT, State.PENDING, Actor.RECONCILE, "")
    scene.journal.apply([Move(0, 1, back, {"reason": f"{Reject.NOT_FINITE}: NaN", "strikes": 1})], 1)
    scene.dump(0)
    scene.reconcile()
    assert (scene.states(), scene.names()) == ({}, set())
    assert scene.journal.rows_of([0])[0]["strikes"] == 1


def test_a_file_that_is_already_whole_is_taken_where_its_dump_is_gone(scene):
    scene.put(0, State.DUMPED)
    scene.put(1, State.DUMPED)
    scene.dump(1)
    scene.reconcile(finished={0: FILE, 1: FILE})
    assert scene.states() == {0: "written", 1: "dumped"}
    assert scene.journal.rows_of([0])[0]["output_path"] == FILE["output_path"]


@pytest.mark.parametrize("strikes", [1, 2])
def test_a_bad_dump_costs_a_strike_and_the_last_one_the_row(scene, strikes):
    scene.put(0, State.DUMPED, strikes=strikes)
    scene.dump(0, dtype="float16")
    scene.reconcile()
    row = scene.journal.rows_of([0])[0]
    assert (row["state"], row["strikes"]) == (("pending", 2) if strikes == 1 else ("failed", 3))
    assert "wrong_dtype" in row["reason"]


def test_a_newer_worker_fences_it_before_anything_is_removed(scene):
    everything(scene)
    made = scene.plan()
    scene.journal.raise_epoch()
    names = scene.names()
    with pytest.raises(FencedError):
        apply(made, scene.journal, 1, [scene.fd], scene.rejects, scene.out, scene.events.append)
    assert scene.names() == names


def test_an_entry_that_can_not_be_removed_stops_nobody(scene):
    """FAULTS C13, here by a folder inside, which is never ours to delete."""
    scene.put(0, State.VERIFIED)
    scene.dump(0, edit=lambda tmp: (tmp / "sub").mkdir())
    scene.put(1, State.VERIFIED)
    scene.dump(1)
    scene.reconcile()
    assert scene.names() == {str(scene.rid(0))}
    assert [(e.kind, e.row) for e in scene.events] == [("cleanup_failed", 0), ("dump_removed", 1)]


def test_a_dump_that_can_not_be_opened_is_nobodys_strike(scene, monkeypatch):
    scene.put(0, State.SENT)
    scene.dump(0)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reader, "open_dump", refuse)
    scene.reconcile()
    row = scene.journal.rows_of([0])[0]
    assert (row["state"], row["strikes"]) == ("pending", 0)


def test_hidden_temporaries_of_killed_writers_go_and_nothing_else_of_the_output(scene):
    (scene.out / ".tmp-a").touch()
    (scene.out / "data_0.ckpt").touch()
    made = scene.reconcile(temporaries=[".tmp-a", ".gone-already"])
    assert made.temporaries == (".tmp-a", ".gone-already")
    assert [p.name for p in scene.out.iterdir()] == ["data_0.ckpt"]


def test_another_layer_convention_is_not_taken_for_this_runs(scene):
    scene.put(0, State.SENT)
    scene.dump(0)
    shifted = replace(MANIFEST, capture_layers=(2, 4, 6))
    made = plan(gather(scene.journal, [scene.fd], shifted))
    assert [r.detail.partition(":")[0] for r in made.removals] == ["wrong_layers"]
