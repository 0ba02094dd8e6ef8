"""``adopt --dumps``: the incident's two unread directories, and everything that must not be taken for a row."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsjournal.drift import READING
from hsjournal.errors import ExitCode, JournalLockedError
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Move
from hsjournal.ops.draining import drain
from hsjournal.states import Actor, State, Transition
from tests.helpers.cli import hsjournal
from tests.helpers.fake_server import FakeServer
from tests.helpers.journals import FILE
from tests.helpers.worker_runs import Run, collected, states_of

__all__ = ["collected"]
LENGTHS = (20, 21, 21, 22, 23, 24)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    options = {"handover_root": str(tmp_path / "root"), "server": ""}
    return Run(tmp_path, LENGTHS, manifest={"options": options})


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Where the v1 server wrote."""
    folder = tmp_path / "sglang_hs"
    folder.mkdir()
    return folder


def leave(
    root: Path, number: int, ids: Sequence[int], *, meta: dict[str, Any] | None = None, done: bool = True, aux: int = 3
) -> Path:
    """A ``req_N`` of these ids, by real ``torch.save``."""
    folder = root / f"req_{number}"
    folder.mkdir()
    for name, bits in states_of(ids).items():
        if name == "final" or int(name.removeprefix("aux_")) < aux:
            torch.save(torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16), folder / f"{name}.pt")
    (folder / "meta.json").write_text(json.dumps(meta if meta is not None else {"num_tokens": len(ids)}))
    if done:
        (folder / "done").touch()
    return folder


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_the_two_unread_dumps_of_the_incident(run: Run, left: Path) -> None:
    leave(left, 22391, run.ids[0])
    leave(left, 22392, run.ids[3])
    (left / "psm_x").touch()
    before = drain(run.paths, left, dry_run=True)
    assert before.taken == {"req_22391": 0, "req_22392": 3}
    assert run.states() == ["pending"] * 6
    assert run.in_root() == []

    done = drain(run.paths, left, dry_run=False)
    assert done.taken == before.taken
    assert run.states() == ["dumped", "pending", "pending", "dumped", "pending", "pending"]
    assert names(left) == ["psm_x", "req_22391", "req_22392"], "nothing is deleted before it is verified"
    again = drain(run.paths, left, dry_run=False)
    assert (again.taken, again.removed) == ({}, {})
    assert "not verified yet" in again.refused["req_22391"]

    async def job() -> list[str]:
        async with FakeServer(run.root) as server:
            end = await run.work(server_url=server.url)
            assert end.code == 0, end.sentence
            return [rid for row in (0, 3) for rid in server.rids(row)]

    assert asyncio.run(job()) == [], "what was adopted was not sent again"
    run.assert_all_verified()
    last = drain(run.paths, left, dry_run=False)
    assert sorted(last.removed) == ["req_22391", "req_22392"]
    assert all(freed > 0 for freed in last.removed.values())
    assert names(left) == ["psm_x"]
    assert "not proven" in run.events("dump_adopted")[0].detail["by"]


def test_what_can_not_be_told_is_left_alone(run: Run, left: Path) -> None:
    leave(left, 1, run.ids[1])  # 21 tokens: two rows
    leave(left, 2, run.ids[4])
    leave(left, 3, [7] * 23)  # 23 tokens: two directories
    leave(left, 4, run.ids[5], done=False)
    leave(left, 5, run.ids[0], aux=2)
    leave(left, 6, [5] * 40)
    leave(left, 7, run.ids[3], meta={"num_tokens": 9})
    torn = leave(left, 8, run.ids[3]) / "final.pt"
    torn.write_bytes(torn.read_bytes()[:-200])
    (left / "req_9").symlink_to(left / "req_2")
    before = {p: p.stat().st_mtime_ns for p in left.rglob("*")}
    found = drain(run.paths, left, dry_run=False)
    assert found.taken == {}
    why = found.refused
    assert "2 rows" in why["req_1"]
    assert "could all be row 4's" in why["req_2"]
    assert why["req_2"] == why["req_3"]
    assert "not complete" in why["req_4"]
    assert "2 aux layers" in why["req_5"]
    assert "no row" in why["req_6"]
    assert "wrong_count" in why["req_7"]
    assert "final.pt" in why["req_8"]
    assert "req_9" not in why
    assert run.states() == ["pending"] * 6
    assert {p: p.stat().st_mtime_ns for p in left.rglob("*")} == before


def test_what_is_left_of_a_verified_row_is_not_given_to_the_only_open_row_of_its_length(run: Run, left: Path) -> None:
    """A retry of row 1, or a client killed before it deleted row 1's dump: of 21 tokens row 2 alone is open."""
    with run.journal() as journal:
        moves = [
            Move(1, 0, Transition(State.PENDING, State.WRITTEN, Actor.ADOPT, ""), FILE),
            Move(1, 0, Transition(State.WRITTEN, State.VERIFIED, Actor.ADOPT, ""), {"verify_method": "direct"}),
        ]
        journal.apply(moves, journal.raise_epoch())
    leave(left, 1, run.ids[1])
    found = drain(run.paths, left, dry_run=False)
    assert found.taken == {}
    assert "2 rows of the input have 21 tokens" in found.refused["req_1"]
    assert run.states()[1:3] == ["verified", "pending"]
    leave(left, 2, run.ids[2], meta={"input_ids": list(run.ids[2])})
    assert drain(run.paths, left, dry_run=False).taken == {"req_2": 2}, "its own token ids tell it"


def test_a_shard_knows_the_lengths_of_its_own_rows_only(tmp_path: Path, left: Path) -> None:
    options = {"handover_root": str(tmp_path / "root"), "server": "", f"{READING}shard": "1/2"}
    run = Run(tmp_path, LENGTHS, manifest={"options": options})
    leave(left, 1, run.ids[0])
    leave(left, 2, run.ids[3], meta={"input_ids": list(run.ids[3])})
    found = drain(run.paths, left, dry_run=False)
    assert found.taken == {"req_2": 3}
    assert "shard" in found.refused["req_1"]


def test_token_ids_in_the_meta_decide(run: Run, left: Path) -> None:
    leave(left, 1, run.ids[1], meta={"input_ids": list(run.ids[1])})
    leave(left, 2, run.ids[2], meta={"token_ids": list(run.ids[2])})
    leave(left, 3, run.ids[0], meta={"input_ids": [9] * 20})  # the right length, other ids
    found = drain(run.paths, left, dry_run=False)
    assert found.taken == {"req_1": 1, "req_2": 2}
    assert "no row" in found.refused["req_3"]
    assert {event.detail["by"] for event in run.events("dump_adopted")} == {"token ids"}


def test_a_directory_that_changed_after_it_was_handed_on_stays(run: Run, left: Path) -> None:
    folder = leave(left, 1, run.ids[0])
    drain(run.paths, left, dry_run=False)

    async def job() -> None:
        async with FakeServer(run.root) as server:
            assert (await run.work(server_url=server.url)).code == 0

    asyncio.run(job())
    file = folder / "final.pt"
    data = bytearray(file.read_bytes())
    data[data.index(states_of(run.ids[0])["final"].tobytes()) + 3] ^= 1
    file.write_bytes(data)
    assert drain(run.paths, left, dry_run=False).removed == {}
    assert names(left) == ["req_1"]


def test_not_beside_a_live_run(run: Run, left: Path) -> None:
    lock = Lock(run.paths.supervisor_lock)
    lock.acquire()
    try:
        with pytest.raises(JournalLockedError):
            drain(run.paths, left, dry_run=True)
    finally:
        lock.release()


def test_on_the_command_line(run: Run, left: Path) -> None:
    leave(left, 1, run.ids[0])
    done = hsjournal("adopt", run.paths.run_dir, "--dumps", left, "--dry-run")
    assert done.code == 0, done.err
    assert "req_1: row 0" in done.out
    assert hsjournal("adopt", run.paths.run_dir, "--dumps", left, "--json").json()["taken"] == {"req_1": 0}
    assert hsjournal("adopt", run.paths.run_dir).code == ExitCode.USAGE
    assert hsjournal("adopt", run.paths.run_dir, "--dumps", left / "nowhere").code == ExitCode.USAGE
