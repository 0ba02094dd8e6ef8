"""The HTTP client for SGLang's native endpoints, which the embedded engine answers alike."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from hsjournal.config import KEY_VARIABLE, Settings
from hsjournal.errors import HsjournalError, ServerError, UsageError

QUICK_TIMEOUT = 5.0
"""Seconds for an answer that needs no prefill; a busy server has been seen to take more than one."""


class UnreachableError(ServerError):
    """No connection could be made: an outage, and nobody's strike."""


class BrokenError(UnreachableError):
    """The connection broke under a request: the server may have died, perhaps of this very request."""


class TimedOutError(ServerError):
    """The server took the request and did not answer in time."""


class NonsenseError(ServerError):
    """The answer is not JSON, or not of this kind of server."""


class RefusedError(HsjournalError):
    """The server answered with an error status.

    Args:
        status: the HTTP status; 4xx means that this request can't be served, 5xx that the server failed.
        detail: the server's own words.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the server answered {status}: {detail}")
        self.status = status
        self.detail = detail


HELD = "held"
"""The type of the error in a v1 gateway's answer to a request that it did not send on."""


class HeldError(RefusedError):
    """The v1 gateway did not send the request, which could not be told from another one at the server: nobody's fault."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server says of a finished prefill. Not proof of a dump: that is written after, or never."""

    prompt_tokens: int
    finish_reason: str


def client_of(url: str, settings: Settings) -> ServerClient:
    """A client of one of a run's servers; the API key comes from the environment."""
    return ServerClient(
        url,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        max_connections=settings.max_in_flight,
        api_key=os.environ.get(KEY_VARIABLE, ""),
    )


class ServerClient:
    """One server.

    Args:
        url: ``http://HOST:PORT``; proxies in the environment are ignored.
        connect_timeout: seconds to get a connection.
        read_timeout: seconds of silence after which a request is given up.
        max_connections: requests in flight.
        api_key: sent as a bearer token; never logged.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_connections: int = 64,
        api_key: str = "",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"not the address of a server: {url!r}", remedy="Give it as http://HOST:PORT.")
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=read_timeout)
        self._quick = aiohttp.ClientTimeout(total=min(read_timeout, max(QUICK_TIMEOUT, connect_timeout)))
        self._connections = max_connections
        self._api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A connection each: an idle one that the server closes as a request leaves looks like a server that died of it.
        connector = aiohttp.TCPConnector(limit=self._connections + 4, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, rid: str, input_ids: Sequence[int]) -> Reply:
        """Prefill ``input_ids`` once under the request id ``rid``.

        One token is asked for, so that no request can run on; ``extra_key`` keeps it out of other requests' prefix cache.

        Returns:
            What the answer says; an answer that says nothing understandable is an empty reply, since only the dump counts.

        Raises:
            UnreachableError: no connection.
            BrokenError: the connection broke before the answer was whole.
            TimedOutError: silence for longer than the read time-out.
            RefusedError: an error status.
        """
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "stream": False,
            "extra_key": rid,
        }
        try:
            answer = await self._call("POST", "/generate", self._timeout, body)
        except NonsenseError:
            return Reply(-1, "")
        answer = answer[0] if isinstance(answer, list) and answer else answer
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        meta = meta if isinstance(meta, dict) else {}
        reason = meta.get("finish_reason") or {}
        tokens = meta.get("prompt_tokens")
        return Reply(
            prompt_tokens=tokens if type(tokens) is int else -1,
            finish_reason=str(reason.get("type", "") if isinstance(reason, dict) else reason),
        )

    async def server_info(self) -> dict[str, Any]:
        """The server's resolved settings; with the embedded engine or our plugin also the key ``hsjournal``.

        Raises:
            UnreachableError, TimedOutError, RefusedError: as for :meth:`generate`.
        """
        try:
            info = await self._call("GET", "/server_info", self._quick)
        except RefusedError as error:
            if error.status != 404:
                raise
            info = await self._call("GET", "/get_server_info", self._quick)
        if not isinstance(info, dict):
            raise ServerError(
                f"{self.url} does not answer like an SGLang server", remedy="Check the address (--server)."
            )
        return info

    async def abort(self, rid: str) -> None:
        """Ask the server to drop a request; it may be too late."""
        await self._call("POST", "/abort_request", self._quick, {"rid": rid})

    async def _call(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, body: dict[str, Any] | None = None
    ) -> Any:
        if self._session is None:
            raise RuntimeError("use the client as a context manager")
        where = self.url + path
        try:
            # No redirects: the key is for this server only.
            async with self._session.request(
                method, where, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    raise _refusal(response.status, self._without_key(await response.text()))
                return await response.json(content_type=None) if response.content_length != 0 else None
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise UnreachableError(
                f"the server at {self.url} can't be reached: {error}",
                remedy="Start it, or check the address (--server).",
            ) from error
        except TimeoutError as error:
            raise TimedOutError(f"{where} did not answer in time") from error
        except ValueError as error:
            raise NonsenseError(f"{where} answered something that is not JSON: {error}") from error
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            words = str(error) or type(error).__name__
            raise BrokenError(f"the connection to {self.url} broke: {words}") from error

    def _without_key(self, text: str) -> str:
        """Servers like to repeat a key that they refuse; it must reach neither journal nor log."""
        return text.replace(self._api_key, "***") if self._api_key else text


def _refusal(status: int, text: str) -> RefusedError:
    """What an error status means; a gateway of ours says by its error's type that it holds a request back."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE and f'"{HELD}"' in text:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(text)["error"]
            if error["type"] == HELD:
                return HeldError(status, str(error["message"]))
    return RefusedError(status, text[:500])
