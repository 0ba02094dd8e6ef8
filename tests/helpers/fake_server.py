"""A scripted server for faults only: SGLang's native endpoints and protocol v2 dumps, wrong in whatever way a test asks.

Without a script it is a good server. It also watches its client: what no client may ever do lands in ``violations``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from hsjournal.dump.protocol import CaptureFailure, FailureReason, RequestId
from tests.helpers.dumps import FabricatedDump, write_dump, write_failure
from tests.helpers.worker_runs import BYTES_PER_TOKEN, DTYPE, HIDDEN, LAYERS, RUN_ID, states_of

Edit = Callable[[Path], None]


@dataclass(eq=False)
class Call:
    """One ``/generate`` request.

    ``nth`` counts the requests for this row, from 1; ``aborted`` is set by ``/abort_request``.
    """

    server: FakeServer
    rid: RequestId
    ids: array[int]
    body: dict[str, Any]
    request: web.Request
    nth: int
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(
        self, *, edit: Edit | None = None, rid: RequestId | str | None = None, noise: int = 0, **meta: Any
    ) -> FabricatedDump:
        """Publish a dump: whole and right, but for what is asked otherwise."""
        return self.server.publish(self.ids, rid or self.rid, edit=edit, noise=noise, **meta)

    def fail(self, reason: FailureReason, detail: str = "as the test says") -> None:
        """Publish ``error`` instead."""
        failure = CaptureFailure(str(self.rid), reason, detail, self.server.boot_id)
        write_failure(self.server.root, self.rid, failure)

    def reply(self, *, prompt_tokens: int | None = None, finish: str = "length") -> web.Response:
        """The usual answer."""
        tokens = len(self.ids) if prompt_tokens is None else prompt_tokens
        meta = {"id": str(self.rid), "prompt_tokens": tokens, "finish_reason": {"type": finish, "length": 1}}
        return web.json_response({"text": "", "meta_info": meta})

    def cut(self) -> web.Response:
        """Break the connection."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return web.Response()


Behaviour = Callable[[Call], Awaitable[web.StreamResponse]]


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look again and again until ``condition`` holds; a test that waits longer has failed."""
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def good(call: Call) -> web.StreamResponse:
    """The dump, then the answer."""
    call.publish()
    return call.reply()


async def hang(call: Call) -> web.StreamResponse:
    """No answer, and no dump, until it is aborted."""
    await call.aborted.wait()
    return call.reply(finish="abort")


async def no_dump(call: Call) -> web.StreamResponse:
    """An answer, and never a dump."""
    return call.reply()


async def cut(call: Call) -> web.StreamResponse:
    """The request is taken, then the connection breaks."""
    return call.cut()


def lethal(seconds: float = 0.2) -> Behaviour:
    """The server dies of the request, and comes back as another life."""

    async def answer(call: Call) -> web.StreamResponse:
        server = call.server
        server.lives += 1
        server.soon(server.bounce(f"life-{server.lives}", seconds))
        return await hang(call)

    return answer


def status(code: int, text: str = "as the test says") -> Behaviour:
    """An error status."""

    async def answer(_call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=code)

    return answer


def dump(**changes: Any) -> Behaviour:
    """A dump that is changed as :meth:`Call.publish` can, then the usual answer."""

    async def answer(call: Call) -> web.StreamResponse:
        call.publish(**changes)
        return call.reply()

    return answer


def failure(reason: FailureReason) -> Behaviour:
    """A typed failure instead of a dump."""

    async def answer(call: Call) -> web.StreamResponse:
        call.fail(reason)
        return call.reply()

    return answer


def later(seconds: float, then: Behaviour = good) -> Behaviour:
    """The same after a while."""

    async def answer(call: Call) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await then(call)

    return answer


@dataclass
class _Rule:
    do: Behaviour
    rows: frozenset[int] | None
    attempts: frozenset[int] | None
    probes: bool
    times: int

    def takes(self, call: Call) -> bool:
        if self.times <= 0:
            return False
        if call.rid.row is None:
            return self.probes
        if self.rows is not None and call.rid.row not in self.rows:
            return False
        return self.attempts is None or call.rid.attempt in self.attempts


class FakeServer:
    """A server that does what it is told; an asynchronous context manager.

    Args:
        root: where its dumps go.
        boot_id: of its first life.
        tells: whether ``/server_info`` names the requests in flight, as the embedded engine does and SGLang does not.
        budget: bytes that requests and dumps together may never exceed.
        max_in_flight: requests of samples that may never be exceeded.
        max_probes: probes in flight that may never be exceeded.
    """

    def __init__(
        self,
        root: Path,
        *,
        boot_id: str = "life-1",
        tells: bool = True,
        budget: int | None = None,
        max_in_flight: int = 4,
        max_probes: int = 1,
    ) -> None:
        self.root, self.boot_id, self.tells = root, boot_id, tells
        self.lives = 1
        self.info: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.calls: list[Call] = []
        self.current: list[Call] = []
        self.aborted: list[str] = []
        self.looks: Counter[str] = Counter()
        self.look_delay = 0.0
        self.headers: list[dict[str, str]] = []
        self.violations: list[str] = []
        self.most_in_flight = 0
        self._budget, self._max_in_flight, self._max_probes = budget, max_in_flight, max_probes
        self._rules: list[_Rule] = []
        self._counts: Counter[int | None] = Counter()
        self._runner: web.AppRunner | None = None
        self._held = _hold_port()
        self._port = int(self._held.getsockname()[1])
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens, or will again."""
        return f"http://127.0.0.1:{self._port}"

    def on(
        self,
        do: Behaviour,
        *,
        row: int | Iterable[int] | None = None,
        attempt: int | Iterable[int] | None = None,
        probes: bool = False,
        times: int = 1 << 30,
    ) -> None:
        """Do this for requests of ``row`` at ``attempt`` (all, where nothing is said), so many ``times``.

        Rules are tried in their order. Those for ``probes`` take all probes, and samples too.
        """
        rows, attempts = _set(row), _set(attempt)
        self._rules.append(_Rule(do, rows, attempts, probes, times))

    def forget(self) -> None:
        """From now on a good server again."""
        self._rules.clear()

    def publish(
        self, ids: array[int], rid: RequestId | str, *, edit: Edit | None = None, noise: int = 0, **meta: Any
    ) -> FabricatedDump:
        """Publish a dump of ``ids`` as ``rid``."""

        def fill(folder: Path) -> None:
            arrays = states_of(ids, noise)
            for name, array_ in arrays.items():
                path = folder / f"{name}.bin"
                if path.exists() and path.stat().st_size == array_.nbytes:
                    array_.tofile(path)
            if edit is not None:
                edit(folder)

        usual: dict[str, Any] = {"dtype": DTYPE, "hidden": HIDDEN, "num_aux": len(LAYERS), "boot_id": self.boot_id}
        changed = usual | self.meta | meta
        return write_dump(self.root, rid, ids, edit=fill, **changed)

    def soon(self, work: Awaitable[object]) -> None:
        """Do something beside the request that asked for it."""

        async def do() -> None:
            await work

        task = asyncio.ensure_future(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def rids(self, row: int) -> list[str]:
        """The request ids that came for a row, in order."""
        return [str(call.rid) for call in self.calls if call.rid.row == row]

    @property
    def probes(self) -> int:
        """How many probes came."""
        return sum(call.rid.row is None for call in self.calls)

    async def die(self) -> None:
        """Go away: every connection breaks, and no new one is taken."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for site in list(runner.sites):
            await site.stop()
        for call in list(self.current):
            call.cut()
        await runner.cleanup()
        self.current.clear()

    async def rise(self, boot_id: str | None = None) -> None:
        """Come (back), as another life if ``boot_id`` says so."""
        self.boot_id = boot_id or self.boot_id
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/server_info", "/health", "/health_generate"):
            app.router.add_get(path, self._look)
        self._runner = web.AppRunner(app, shutdown_timeout=0.02, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def bounce(self, boot_id: str | None = None, seconds: float = 0.2) -> None:
        """Die, and come back after a while."""
        await self.die()
        await asyncio.sleep(seconds)
        await self.rise(boot_id)

    async def __aenter__(self) -> Self:
        await self.rise()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()
        self._held.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if kind is None:
            assert not self.violations, self.violations

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        rid = RequestId.parse(body["rid"])
        assert rid is not None
        self._counts[rid.row] += 1
        call = Call(self, rid, array("I", body["input_ids"]), body, request, self._counts[rid.row])
        self.headers.append(dict(request.headers))
        self._inspect(call)
        self.calls.append(call)
        self.current.append(call)
        try:
            return await self._behaviour(call)(call)
        finally:
            if call in self.current:
                self.current.remove(call)

    def _behaviour(self, call: Call) -> Behaviour:
        for rule in self._rules:
            if rule.takes(call):
                rule.times -= 1
                return rule.do
        return good

    def _inspect(self, call: Call) -> None:
        body, rid = call.body, call.rid
        if body["sampling_params"] != {"max_new_tokens": 1, "temperature": 0.0} or body["stream"] is not False:
            self.violations.append(f"{rid}: would generate more than one token: {body['sampling_params']}")
        if rid.tokens != len(call.ids) or rid.run != RUN_ID:
            self.violations.append(f"{rid}: promises other tokens than it brings ({len(call.ids)})")
        if any(str(rid) == str(other.rid) for other in self.calls):
            self.violations.append(f"{rid}: sent twice")
        wanted = [c for c in (*self.current, call) if not c.aborted.is_set()]
        samples = [c for c in wanted if c.rid.row is not None]
        probes = [c for c in wanted if c.rid.row is None]
        self.most_in_flight = max(self.most_in_flight, len(samples))
        if len(samples) > self._max_in_flight or len(probes) > self._max_probes:
            self.violations.append(f"{rid}: {len(samples)} samples and {len(probes)} probes in flight")
        if self._budget is not None:
            names = {str(c.rid) for c in samples} | set(self._dumps())
            used = sum(asked.tokens for name in names if (asked := RequestId.parse(name))) * BYTES_PER_TOKEN
            if used > self._budget:
                self.violations.append(f"{call.rid}: {used:,} bytes asked for, the budget is {self._budget:,}")

    def _dumps(self) -> list[str]:
        return [p.name for p in self.root.iterdir() if p.name.startswith("hsj-")] if self.root.exists() else []

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        rid = json.loads(await request.read())["rid"]
        self.aborted.append(rid)
        for call in self.current:
            if str(call.rid) == rid:
                call.aborted.set()
        return web.Response()

    async def _look(self, request: web.Request) -> web.StreamResponse:
        self.looks[request.path] += 1
        await asyncio.sleep(self.look_delay)
        if request.path != "/server_info":
            return web.Response()
        ours: dict[str, Any] = {"boot_id": self.boot_id, "num_layers": 8, "hidden_size": HIDDEN, "vocab_size": 32_000}
        if self.tells:
            ours["in_flight"] = [str(call.rid) for call in self.current]
        info = {"model_path": "/models/fake", "context_length": 4096, "chunked_prefill_size": -1, "hsjournal": ours}
        return web.json_response(info | self.info)


def _set(value: int | Iterable[int] | None) -> frozenset[int] | None:
    if value is None:
        return None
    return frozenset([value] if isinstance(value, int) else value)


def _hold_port() -> socket.socket:
    """A socket on a free port, which nobody else gets while it is open: also not while the server is away."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
