"""The faults of the in-process campaign, each a function that arms one on a scene and says what it was."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import FailureReason
from hsjournal.faults import InjectedError
from tests.helpers.drill.scene import FOREIGN, Scene
from tests.helpers.fake_server import (
    Behaviour,
    Call,
    Edit,
    FakeServer,
    cut,
    dump,
    failure,
    good,
    hang,
    later,
    lethal,
    no_dump,
    status,
)
from tests.helpers.worker_runs import RUN_ID

LATE = 1.25
LINKED = "psm_linked"
CRASH_POINTS = (
    "worker.claiming", "worker.sent_committed", "worker.requested", "worker.dump_seen", "worker.dumped_committed",
    "sink.opened", "sink.writing", "sink.written", "sink.synced", "sink.linking", "sink.linked", "sink.published",
    "worker.written_committed", "verify.reading", "verify.done", "worker.verified_committed", "reap.deleting",
    "reap.deleted", "journal.committing", "reconcile.applying",
)  # fmt: skip
STORAGE_POINTS = ("sink.opened", "sink.writing", "sink.written", "sink.synced", "sink.linking", "sink.linked", "sink.published", "verify.reading")  # fmt: skip
STORAGE_ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ETIMEDOUT", "ENOMEM")


def _unlink(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def _cut_short(folder: Path) -> None:
    os.truncate(folder / "aux_1.bin", (folder / "aux_1.bin").stat().st_size - 3)


def _not_finite(folder: Path) -> None:
    data = bytearray((folder / "final.bin").read_bytes())
    data[-2:] = b"\xff\x7f"
    (folder / "final.bin").write_bytes(data)


def _nonsense(folder: Path) -> None:
    (folder / "meta.json").write_bytes(b'{"num_tokens": NaN}')


def _a_link(folder: Path) -> None:
    (folder / "aux_0.bin").rename(folder.parent / LINKED)
    (folder / "aux_0.bin").symlink_to(folder.parent / LINKED)


WRONG: dict[str, Behaviour] = {
    "torn": dump(edit=_cut_short),
    "not finite": dump(edit=_not_finite),
    "no meta": dump(edit=_nonsense),
    "a file missing": dump(edit=_unlink("aux_2.bin")),
    "other ids": dump(token_ids_sha256="0" * 64),
    "a link": dump(edit=_a_link),
}
SERVER: dict[str, tuple[Behaviour, bool]] = {
    "no dump": (no_dump, True),
    "hangs": (hang, True),
    "cut": (cut, True),
    "500": (status(500), True),
    "503": (status(503), False),
    "429": (status(429), False),
    "no room": (failure(FailureReason.NO_ROOM), False),
    "aborted": (failure(FailureReason.ABORTED), False),
    "internal": (failure(FailureReason.INTERNAL), True),
}


def wrong_dump(scene: Scene) -> str:
    """A dump that must be refused, once."""
    name = scene.draw.choice(sorted(WRONG))
    scene.server.on(WRONG[name], row=scene.a_row(striking=True), attempt=range(1, 9), times=1)
    return f"wrong dump: {name}"


def server_trouble(scene: Scene) -> str:
    """An answer that is none, once."""
    name = scene.draw.choice(sorted(SERVER))
    behaviour, strikes = SERVER[name]
    scene.server.on(behaviour, row=scene.a_row(striking=strikes), attempt=range(1, 9), times=1)
    return f"server: {name}"


def late_dump(scene: Scene) -> str:
    """It comes after its request was given up."""

    async def late(call: Call) -> Any:
        async def come() -> None:
            await asyncio.sleep(LATE)
            with contextlib.suppress(OSError):
                FakeServer.publish(call.server, call.ids, call.rid)

        call.server.soon(come())
        return await hang(call)

    scene.server.on(late, row=scene.a_row(striking=True), attempt=range(1, 9), times=1)
    return "late dump"


def slow_server(scene: Scene) -> str:
    """Slow, but in time: nothing may come of it."""
    scene.server.on(later(0.3, good), row=scene.a_row(), attempt=range(1, 9), times=1)
    return "slow server"


def server_restart(scene: Scene) -> str:
    """The server dies of a request and comes back as another life."""
    scene.server.on(lethal(), row=scene.a_row(striking=True), attempt=range(1, 9), times=1)
    return "server restart"


def storage_error(scene: Scene) -> str:
    """The output's disk answers with an error, once."""
    name, point = scene.draw.choice(STORAGE_ERRORS), scene.draw.choice(STORAGE_POINTS)
    code = getattr(errno, name)

    def fail(_row: int | None) -> None:
        raise OSError(code, os.strerror(code))

    scene.inject.arm(point, scene.a_row(), fail)
    return f"storage: {name}"


def slow_storage(scene: Scene) -> str:
    """A step takes its time."""
    import time

    point = scene.draw.choice(STORAGE_POINTS)
    scene.inject.arm(point, scene.a_row(), lambda _row: time.sleep(0.2))
    return "slow storage"


def crash(scene: Scene) -> str:
    """The worker crashes at a named point; its threads may go on for a while, as those of one that is stuck."""
    point = scene.draw.choice(CRASH_POINTS)
    row = None if point.startswith(("journal.", "reconcile.", "reap.")) else scene.a_row()

    def die(_row: int | None) -> None:
        raise InjectedError(f"the campaign at {point}")

    scene.inject.arm(point, row, die)
    return f"crash at {point}"


def damaged_file(scene: Scene) -> str:
    """A byte of the finished file changes before it is read back."""
    row = scene.a_row(striking=True)

    def flip(_row: int | None) -> None:
        for path in Path(scene.run.manifest.out_dir).rglob(f"data_{row}.ckpt"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 64
            path.write_bytes(data)

    scene.inject.arm("sink.published", row, flip)
    return "damaged file"


def vanished_dump(scene: Scene) -> str:
    """Somebody deletes the dump just as it is found."""
    row = scene.a_row()

    def vanish(_row: int | None) -> None:
        scene.server.spoiled(row)
        for path in scene.run.root.glob(f"hsj-{RUN_ID}-{row}-*-*"):
            shutil.rmtree(path, ignore_errors=True)

    scene.inject.arm("worker.dump_seen", row, vanish)
    return "vanished dump"


def deleted_root(scene: Scene) -> str:
    """The hand-over root goes away under the run, and all dumps with it."""

    def delete(_row: int | None) -> None:
        scene.server.spoiled()
        for path in scene.run.root.iterdir():
            if path.name not in FOREIGN:
                shutil.rmtree(path, ignore_errors=True)

    scene.inject.arm("worker.requested", scene.a_row(), delete)
    return "emptied root"


def poison(scene: Scene) -> str:
    """A row whose dumps are never right: it alone must fail."""
    row = scene.a_row(striking=True)
    scene.poison.add(row)
    scene.server.on(WRONG["not finite"], row=row)
    return "poison"


KINDS: tuple[tuple[Callable[[Scene], str], int], ...] = (
    (wrong_dump, 4), (server_trouble, 4), (late_dump, 2), (slow_server, 2), (server_restart, 1), (storage_error, 6),
    (slow_storage, 2), (crash, 8), (damaged_file, 2), (vanished_dump, 2), (deleted_root, 1), (poison, 1),
)  # fmt: skip
