"""A fleet on Ray: one actor a node, which runs one shard after the other; Ray places them and starts them anew."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hsjournal.errors import ExitCode, HsjournalError, ServerError, UsageError
from hsjournal.fleet.look import CLAIM, shard_name
from hsjournal.fleet.openness import refuse_open_cluster
from hsjournal.fleet.order import Order
from hsjournal.fleet.start import Start
from hsjournal.fleet.telling import Telling

NAMESPACE = "hsjournal"
LOOK_EVERY = 2.0
_REMEDY = "Ray must be of one version everywhere, and a node of the cluster must run on this machine."


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which cluster, and what of it.

    Args:
        address: ``HOST:PORT`` of its head.
        resource: custom resource of the nodes that take shards, one of it for each.
        most_starts_again: of one shard, by Ray; then it has given up.
        trusted: whether it may do without authentication.
    """

    address: str
    resource: str = "hsjournal"
    most_starts_again: int = 20
    trusted: bool = False


class KeptNumbers:
    """Incarnations in the key-value store of Ray's head, whose put can be told not to replace."""

    place = ""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet

    def claim(self, shard: str, above: int) -> int:
        """As :meth:`hsjournal.fleet.numbers.Numbers.claim`."""
        from ray.experimental.internal_kv import _internal_kv_put

        number = max(above, self.highest(shard))
        with _answering():
            while True:
                number += 1
                key = f"{self._of(shard)}{number:06d}"
                if not _internal_kv_put(key, socket.gethostname(), overwrite=False, namespace=NAMESPACE):
                    return number

    def highest(self, shard: str) -> int:
        """As :meth:`hsjournal.fleet.numbers.Numbers.highest`."""
        from ray.experimental.internal_kv import _internal_kv_list

        with _answering():
            keys = _internal_kv_list(self._of(shard), namespace=NAMESPACE)
        return max((int(key.decode().rsplit("-", 1)[1]) for key in keys), default=0)

    def _of(self, shard: str) -> str:
        return f"{self._fleet}/{shard_name(shard)}/{CLAIM}"


@contextmanager
def _answering() -> Iterator[None]:
    from ray.exceptions import RpcError

    try:
        yield
    except RpcError as error:
        raise HsjournalError(
            f"Ray's head does not answer: {error}",
            remedy="See `ray status` there; the same command goes on when it is back.",
        ) from None


class ShardActor:
    """What runs on a node; made into an actor by :func:`run`. Its end, however sudden, is the run's end."""

    def __init__(self, order: Order, number: int) -> None:
        self._start = Start(order, number, KeptNumbers(order.fleet))
        self._once = threading.Lock()

    def run(self) -> dict[str, Any]:
        """The shard, to its end. Ray may call again when it lost the answer: then the answer is given again."""
        with self._once:
            if self._start.telling.code is None:
                self._start.run()
        return self._start.telling.to_json()

    def look(self) -> dict[str, Any]:
        """How it stands."""
        return self._start.look().to_json()

    def stop(self) -> None:
        """Drain; the second time stop at once."""
        self._start.stop()


def run(
    order: Order, cluster: Cluster, show: Callable[[list[Telling]], None], stops: Callable[[], int]
) -> list[Telling]:
    """Run all shards to their ends.

    Args:
        order: the fleet's.
        cluster: where.
        show: draws how all shards stand.
        stops: how many times we were asked to stop so far; the first time shards drain, the second they stop at once.

    Raises:
        UsageError: when Ray isn't installed, the cluster is open, or the fleet runs on it already.
        ServerError: when there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("a fleet on Ray needs Ray, which is not installed", remedy="Install hsjournal[ray].") from None
    refuse_open_cluster(cluster.address, trusted=cluster.trusted)
    try:
        ray.init(
            address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=False,
        )  # fmt: skip
    except (ConnectionError, RuntimeError) as error:
        raise ServerError(f"the Ray cluster at {cluster.address} can't be joined: {error}", remedy=_REMEDY) from None
    # Ray prints every death onto our screen, with escape sequences also where there is no terminal; we tell it ourselves.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # noqa: SLF001
    try:
        return _Driver(ray, order, cluster, show, stops).run()
    finally:
        ray.shutdown()


class _Driver:
    def __init__(
        self, ray: Any, order: Order, cluster: Cluster, show: Callable[[list[Telling]], None], stops: Callable[[], int]
    ) -> None:
        self._ray, self._show, self._stops = ray, show, stops
        shards = range(1, order.of + 1)
        self._tellings = {number: Telling(order.shard(number)) for number in shards}
        self._actors: dict[int, Any] = {}
        options = {
            "num_cpus": 0, "resources": {cluster.resource: 1}, "max_restarts": cluster.most_starts_again,
            "max_task_retries": -1, "max_concurrency": 4,
        }  # fmt: skip
        actor = ray.remote(ShardActor)
        for number in shards:
            name = f"{order.fleet}/{shard_name(order.shard(number))}"
            try:
                self._actors[number] = actor.options(name=name, **options).remote(order, number)
            except ValueError:
                raise UsageError(
                    f"the fleet {order.fleet} runs on this cluster already", remedy="Name another with --name."
                ) from None
        self._runs = {self._actors[number].run.remote(): number for number in shards}
        self._looks: dict[int, Any] = {}

    def run(self) -> list[Telling]:
        looked, stopped = 0.0, 0
        while self._runs:
            done, _ = self._ray.wait(list(self._runs), timeout=0.25)
            for ref in done:
                self._take(self._runs.pop(ref), ref)
            if self._stops() > stopped:
                stopped = self._stops()
                self._stop(at_once=stopped > 1)
            if time.monotonic() - looked >= LOOK_EVERY:
                looked = time.monotonic()
                self._look()
            self._show(list(self._tellings.values()))
        return list(self._tellings.values())

    def _take(self, number: int, ref: Any) -> None:
        """A shard's end; its node is free for the next one."""
        from ray.exceptions import RayError

        try:
            self._tellings[number] = Telling(**self._ray.get(ref))
        except RayError as error:
            if self._tellings[number].code is None:
                words = (str(error).strip().splitlines() or ["it said nothing"])[0]
                self._end(number, f"Ray gave it up: {words}", ExitCode.GAVE_UP)
        self._ray.kill(self._actors[number])

    def _end(self, number: int, sentence: str, code: ExitCode) -> None:
        self._tellings[number] = replace(self._tellings[number], sentence=sentence, code=int(code))

    def _look(self) -> None:
        """Take the answers that have come and ask whoever has none under way: nobody is waited for."""
        from ray.exceptions import RayError, RayTaskError

        for number in self._runs.values():
            ref = self._looks.get(number)
            if ref is not None:
                if not self._ray.wait([ref], timeout=0)[0]:
                    continue
                try:
                    self._tellings[number] = Telling(**self._ray.get(ref))
                except RayTaskError:
                    raise  # an error in our own code
                except RayError:
                    self._tellings[number] = replace(
                        self._tellings[number], sentence="lost; Ray starts it again", rate=0.0
                    )
            self._looks[number] = self._actors[number].look.options(max_task_retries=0).remote()

    def _stop(self, *, at_once: bool) -> None:
        for number in list(self._runs.values()):
            if at_once or not self._tellings[number].incarnation:  # nothing has begun there
                self._end(number, "stopped", ExitCode.TERMINATED)
                self._ray.kill(self._actors[number])
            else:
                self._actors[number].stop.remote()
