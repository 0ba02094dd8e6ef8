"""``python -m hsjournal.server.v1``: stands before a v1 server and answers like an engine of ours."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from hsjournal.config import KEY_VARIABLE
from hsjournal.dump.protocol import RequestId
from hsjournal.lifeline import end_with_parent
from hsjournal.server.client import HELD
from hsjournal.server.v1.dumps import ENGINE
from hsjournal.server.v1.gateway import ADMIT_TIMEOUT_S, DUMP_TIMEOUT_S, Desk, HeldError, Setup

DRAIN_POLL_S = 0.5
DRAIN_LOOKS = 3
"""Looks in a row at which the server had nothing to do, before it counts as drained."""
_LOADS = ("/get_load", "/v1/loads")
_LOAD_KEYS = ("num_reqs", "num_running_reqs", "num_waiting_reqs")


class Front:
    """The HTTP side.

    Args:
        desk: knows whose each dump is.
        upstream: address of the v1 server.
    """

    def __init__(self, desk: Desk, upstream: str) -> None:
        self._desk, self._upstream = desk, upstream.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._is_down = False
        self._seed: Any = None
        self._noting = asyncio.Lock()

    def app(self) -> web.Application:
        """All routes."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/health", self.health)
        app.cleanup_ctx.append(self._life)
        return app

    async def _life(self, _app: web.Application) -> Any:
        key = os.environ.get(KEY_VARIABLE, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, trust_env=False
        ) as session:
            self._session = session
            tasks = [asyncio.create_task(self._desk.run()), asyncio.create_task(self._drain())]
            yield
            for task in tasks:
                task.cancel()

    async def generate(self, request: web.Request) -> web.Response:
        """Forward a request when it can be told from all others at the server."""
        body = await _body(request)
        rid, ids = RequestId.parse(str(body.get("rid"))), body.get("input_ids")
        if rid is None or not isinstance(ids, list) or len(ids) != rid.tokens:
            return _error(400, "no request of hsjournal's: rid and input_ids must agree")
        try:
            await self._desk.admit(rid, ids)
        except HeldError as error:
            return _error(503, str(error), HELD)
        except OSError as error:
            return _error(503, f"the hand-over root {self._desk.setup.root} can't be read: {error.strerror}")
        try:
            reply = await self._call("POST", "/generate", body)
        except asyncio.CancelledError:
            await asyncio.shield(self._desk.give_up(rid.tokens, str(rid)))
            raise
        except aiohttp.ClientConnectorError as error:
            self._saw(error)
            await self._desk.refused(rid.tokens, str(rid))
            return _error(503, f"the server behind the gateway can't be reached: {error}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._desk.give_up(rid.tokens, str(rid))
            return _error(502, f"the connection to the server behind the gateway broke: {error}")
        return await self._passed_on(rid, *reply)

    async def _passed_on(self, rid: RequestId, status: int, answer: bytes) -> web.Response:
        if 400 <= status < 500:
            await self._desk.refused(rid.tokens, str(rid))
        elif status >= 500:
            await self._desk.give_up(rid.tokens, str(rid))
        else:
            self._desk.answered(rid.tokens, str(rid))
        return web.Response(status=status, body=answer, content_type="application/json")

    async def abort(self, request: web.Request) -> web.Response:
        """The client gives a request up; the server is told, and may be too late."""
        rid = RequestId.parse(str((await _body(request)).get("rid")))
        if rid is not None:
            await self._desk.give_up(rid.tokens, str(rid))
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._call("POST", "/abort_request", {"rid": str(rid)}, seconds=5.0)
        return web.json_response({})

    async def server_info(self, _request: web.Request) -> web.Response:
        """The server's own settings, and what the gateway adds to them."""
        try:
            info = await self._info()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return _error(503, f"the server behind the gateway can't be reached: {str(error) or type(error).__name__}")
        desk, theirs = self._desk, info.get("hsjournal")
        ours = {
            "protocol": "v1",
            "boot_id": desk.boot_id,
            "capture_layers": list(desk.setup.layers),
            "final_norm": desk.setup.final_norm,
            "handover_root": str(desk.setup.root),
            "engine": ENGINE,
            "in_flight": desk.in_flight,
            "draining": desk.is_draining,
            "barred": desk.barred,
        }
        return web.json_response(info | {"hsjournal": (theirs if isinstance(theirs, dict) else {}) | ours})

    async def health(self, _request: web.Request) -> web.Response:
        """Whether the server behind answers."""
        try:
            await self._info()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return _error(503, f"the server behind the gateway can't be reached: {str(error) or type(error).__name__}")
        return web.json_response({"ok": True})

    async def _info(self) -> dict[str, Any]:
        try:
            reply = await self._call("GET", "/server_info", seconds=10.0)
            if reply[0] == 404:
                reply = await self._call("GET", "/get_server_info", seconds=10.0)
        except aiohttp.ClientConnectorError as error:
            self._saw(error)
            raise
        return await self._noted(*reply)

    def _saw(self, error: aiohttp.ClientConnectorError) -> None:
        """Only where nothing listens has the server ended. No descriptor, port or name of ours says nothing of it."""
        self._is_down = self._is_down or error.os_error.errno == errno.ECONNREFUSED

    async def _noted(self, status: int, body: bytes) -> dict[str, Any]:
        """The server's settings, and whether they are another life's."""
        info = json.loads(body)
        if status != 200 or not isinstance(info, dict):
            raise ValueError(f"it answers {status}")
        seed, theirs = info.get("random_seed"), info.get("hsjournal")
        mark = (seed, theirs.get("boot_id") if isinstance(theirs, dict) else None)
        async with self._noting:
            if self._is_down or (self._seed is not None and mark != self._seed):
                load = await self._load()  # if that fails, the next look comes here again
                self._is_down = False
                await self._desk.rebooted()
                if load is None:  # it will never say that it has drained: its new life must do
                    await self._desk.drained()
            self._seed = mark
        return info

    async def _drain(self) -> None:
        """While something is barred: until the server has nothing left to do, if it tells."""
        idle = 0
        while True:
            await asyncio.sleep(DRAIN_POLL_S)
            if not self._desk.barred:
                idle = 0
                continue
            try:
                await self._info()  # sees a restart
                load = await self._load()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                idle = 0
                continue
            await self._desk.tells_load(load is not None)
            busy = self._desk.is_writing() or load != 0
            idle = 0 if busy else idle + 1
            if idle >= DRAIN_LOOKS:
                await self._desk.drained()

    async def _load(self) -> int | None:
        """Requests at the server, whoever's; None when it does not tell.

        Raises:
            ClientError, TimeoutError, OSError: when it does not answer.
        """
        for path in _LOADS:
            status, body = await self._call("GET", path, seconds=5.0)
            if status == 200:
                with contextlib.suppress(ValueError):
                    return _sum(json.loads(body))
        return None

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> tuple[int, bytes]:
        assert self._session is not None
        async with asyncio.timeout(seconds):
            async with self._session.request(method, self._upstream + path, json=body, allow_redirects=False) as answer:
                return answer.status, await answer.read()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        value = await request.json()
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _sum(load: Any) -> int | None:
    """All requests in an answer about load, at whatever depth; None when it says nothing of them."""
    if isinstance(load, list):
        parts = [_sum(item) for item in load]
    elif isinstance(load, dict):
        parts = [value for key, value in load.items() if key in _LOAD_KEYS and type(value) is int]
        parts += [_sum(value) for value in load.values() if isinstance(value, list | dict)]
    else:
        parts = []
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _error(status: int, words: str, kind: str = "") -> web.Response:
    return web.json_response({"error": {"message": words, "type": kind}}, status=status)


async def serve(front: Front, host: str, port: int) -> None:
    """Listen until ended; the address goes to standard output."""
    runner = web.AppRunner(front.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    address = runner.addresses[0]
    sys.stdout.write(json.dumps({"url": f"http://{address[0]}:{address[1]}"}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m hsjournal.server.v1", description=__doc__)
    parser.add_argument("--server", required=True, help="the v1 server's address")
    parser.add_argument("--handover-root", type=Path, required=True, help="where it writes req_N")
    parser.add_argument("--layers", required=True, help="that it captures, 0-based, as 1,5,8")
    parser.add_argument("--final-norm", choices=("post", "pre"), default="post")
    parser.add_argument("--state", type=Path, required=True, help="file in tmpfs that outlives the gateway")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dump-timeout", type=float, default=DUMP_TIMEOUT_S)
    parser.add_argument("--admit-timeout", type=float, default=ADMIT_TIMEOUT_S)
    parser.add_argument("--parent-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    layers = tuple(int(part) for part in options.layers.split(","))
    options.handover_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    options.state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    setup = Setup(
        options.handover_root, layers, options.final_norm, options.state, options.dump_timeout, options.admit_timeout
    )

    async def run() -> None:
        await serve(Front(Desk(setup), options.server), options.host, options.port)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
