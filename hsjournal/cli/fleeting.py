"""``hsjournal fleet run`` and ``fleet shard``: from their words to an order, and the order carried out."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsjournal.errors import UsageError
from hsjournal.fleet.order import Order, expanded
from hsjournal.fleet.start import Start
from hsjournal.fleet.telling import Telling, fleet_code

if TYPE_CHECKING:
    from hsjournal.fleet.on_ray import Cluster
    from hsjournal.fleet.on_slurm import Array
    from hsjournal.ui.fleet import FleetScreen

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OURS = {"shard": "--shards", "out": "--out", "adopt_from": "--adopt-from", "dry_run": "", "parent_fd": ""}


def either() -> UsageError:
    """Neither Ray nor Slurm is named, or both."""
    return UsageError("say where the fleet is to run", remedy="Either --ray HOST:PORT or --slurm.")


def checked(words: Sequence[str]) -> tuple[str, ...]:
    """The words for `run`, refused here rather than on every node when they are none.

    Raises:
        UsageError: when they say what the fleet itself decides.
    """
    import typer

    from hsjournal.cli.app import app

    group: Any = typer.main.get_command(app)
    parsed = group.commands["run"].make_context("run", ["RUN_DIR", *words])
    for name, instead in _OURS.items():
        if parsed.params.get(name) not in (None, False, -1, "", [], ()):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} can't be handed on to the shards", remedy=f"Use {instead} of the fleet." if instead else None
            )
    return tuple(words)


def order(
    name: str, of: int, base: str, words: tuple[str, ...], out: str | None, adopt_from: Sequence[str] | None, store: str
) -> Order:
    """What every shard is told.

    Raises:
        UsageError: when the name can't be a folder's.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} can't be a fleet's name", remedy="Use letters, digits, dots, dashes (--name).")
    return Order(
        name,
        of,
        _anchored(base),
        words,
        _anchored(out) if out else None,
        tuple(map(_anchored, adopt_from or ())),
        os.getcwd(),
        store,
    )


def store_of(store: str, base: str, *, one_machine: bool = False) -> str:
    """The folder that numbers the starts; on one machine its base will do.

    Raises:
        UsageError: when none is named and there are more, each with a base of its own.
    """
    if not store and (not one_machine or "$" in base):
        raise UsageError(
            f"{base} is each node's own, so it can't number the starts", remedy="Name a shared folder with --store DIR."
        )
    return str(expanded(store or base))


def shard(which: str) -> tuple[int, int]:
    """``2/8`` as numbers.

    Raises:
        PromptsError: when it is none.
    """
    from hsjournal.prompts.shards import Shard

    found = Shard.parse(which)
    return found.number, found.of


def cluster(address: str, resource: str, most: int, *, trusted: bool) -> Cluster:
    """Which Ray cluster, and what of it."""
    from hsjournal.fleet.on_ray import Cluster

    if not re.fullmatch(r"[^:/\s]+:\d{1,5}", address):
        raise UsageError(
            f"{address!r} is no address", remedy="Write --ray HOST:PORT, of the head (its port is 6379 as a rule)."
        )
    return Cluster(address, resource, most, trusted)


def array(executor: str, seconds: float, at_once: int, sbatch: Sequence[str]) -> Array:
    """How the array job is to be; Slurm counts a task's time in whole minutes."""
    from hsjournal.fleet.on_slurm import Array

    if executor not in ("slurm", "local"):
        raise UsageError(f"there is no executor {executor!r}", remedy="--executor is slurm or local.")
    pairs = [text.partition("=") for text in sbatch]
    if bad := [key for key, equals, _ in pairs if not equals or not key]:
        raise UsageError(f"--sbatch {bad[0]!r} has no value", remedy="Write --sbatch partition=gpu.")
    return Array(executor, int(seconds // 60), at_once, {key: value for key, _, value in pairs})


def on_ray(order: Order, cluster: Cluster, *, plain: bool, quiet: bool) -> int:
    """Run it on Ray; the exit code. The first Ctrl-C drains all shards, the second stops them now.

    The shards end with this process, so it outlives its terminal: ``NAME.screen.log`` takes the lines then.
    """
    from hsjournal.fleet.on_ray import run
    from hsjournal.ui.fleet import fleet_screen

    screen = fleet_screen(plain=plain, quiet=quiet, log=Path.cwd() / f"{order.fleet}.screen.log")
    return _shown(lambda show, stops: run(order, cluster, show, stops), screen, quiet=quiet)


def on_slurm(order: Order, array: Array, *, detach: bool, plain: bool, quiet: bool) -> int:
    """Run it on Slurm; the exit code. Ctrl-C ends only the watching."""
    from hsjournal.fleet.on_slurm import run, submit
    from hsjournal.ui.fleet import fleet_screen

    submission = submit(order, array)
    if detach or not quiet:
        print(submission.words())
    if detach:
        return 0
    screen = fleet_screen(plain=plain, quiet=quiet)
    return _shown(lambda show, stops: run(order, submission, show, stops), screen, quiet=quiet)


def here(order: Order, number: int) -> int:
    """Start one shard in this process's foreground; signals drain it."""
    from hsjournal.fleet.numbers import LinkedNumbers

    start = Start(order, number, LinkedNumbers(Path(order.store), order.fleet), log=False)
    with _signals(start.stop):
        telling = start.run()
    print(f"shard {telling.shard}, incarnation {telling.incarnation}: {telling.sentence}")
    return int(telling.code or 0)


def _shown(
    work: Callable[[Callable[[list[Telling]], None], Callable[[], int]], list[Telling]],
    screen: FleetScreen,
    *,
    quiet: bool,
) -> int:
    from hsjournal.ui.fleet import shard_line, total_line

    caught = list[int]()
    try:
        with _signals(caught.append):
            tellings = work(screen.show, lambda: len(caught))
    finally:
        screen.close()
    if any(telling.code is None for telling in tellings):
        print("the jobs go on by themselves; the same command watches them again")
        return 128 + caught[0]
    if not quiet:
        print(total_line(tellings))
        for telling in tellings:
            if telling.code:
                print(shard_line(telling))
    return int(fleet_code(tellings))


@contextmanager
def _signals(act: Callable[[int], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 are acted on here meanwhile."""
    before = {
        number: signal.signal(number, lambda caught, _frame: act(caught))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _anchored(folder: str) -> str:
    """Absolute, unless it begins with a variable or a home of the node's."""
    return folder if folder.startswith(("$", "~", "/")) else os.path.join(os.getcwd(), folder)
