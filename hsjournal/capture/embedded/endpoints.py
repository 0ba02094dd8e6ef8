"""SGLang's native endpoints over the standard library's HTTP server."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import socketserver
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from hsjournal.capture.embedded.requests import (
    AbortedError,
    BadRequestError,
    EngineError,
    Limits,
    Request,
    TokenMismatchError,
    parse_generate,
    parse_object,
)
from hsjournal.dump.protocol import FailureReason
from hsjournal.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hsjournal.capture.embedded.engine import Engine

log = logging.getLogger(__name__)

_MAX_BODY = 64 << 20
_HEALTH_S = 20.0
_IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints speak for.

    Args:
        engine: takes the requests.
        limits: of the model.
        server_info: the answer of ``/server_info``.
        model_info: the answer of ``/model_info``.
        tokenize: text to token ids; None without a tokenizer.
        detokenize: token id to text; None without a tokenizer.
    """

    engine: Engine
    limits: Limits
    server_info: dict[str, Any]
    model_info: dict[str, Any]
    tokenize: Callable[[str], list[int]] | None
    detokenize: Callable[[int], str] | None


class HttpServer(ThreadingHTTPServer):
    """Bound when made, so that a taken port is told before a model is loaded; :meth:`open` opens it.

    Args:
        host: an address or a name.
        port: 0 for any free one.
        api_key: demanded of every request but those for health, as SGLang does; empty for none.

    Raises:
        ServerError: when the address can't be had.
    """

    daemon_threads = True
    request_queue_size = 512
    service: Service

    def __init__(self, host: str, port: int, api_key: str = "") -> None:
        self._api_key = api_key.encode()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._asked = (host, port)
        super().__init__(self._asked, Handler, bind_and_activate=False)
        with self._told():
            self.server_bind()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        host, port = self._asked[0], self.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def server_bind(self) -> None:
        """Bind without the look-up of ``http.server``, which hangs where there is no name service."""
        socketserver.TCPServer.server_bind(self)

    def admits(self, path: str, authorization: str) -> bool:
        """Whether a request may pass with this header."""
        if not self._api_key or path.startswith("/health"):
            return True
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._api_key)

    def open(self, service: Service) -> None:
        """Take connections from now on; :meth:`serve_forever` answers them."""
        self.service = service
        with self._told():
            self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (the base class calls it)
        """A client that went away is no news."""
        log.debug("the connection of %s broke: %r", client_address, sys.exception())

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.server_close()
            host, port = self._asked
            raise ServerError(
                f"Port {port} of {host} can't be used: {error.strerror or error}",
                remedy="Choose another with --port, or 0 for any free one.",
            ) from None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "hsjournal"
    disable_nagle_algorithm = True
    timeout = _IDLE_S
    server: HttpServer

    def do_GET(self) -> None:
        """Answer a look."""
        self._route("GET")

    def do_POST(self) -> None:
        """Answer a request."""
        self._route("POST")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class names it)
        """Access goes to the debug log."""
        log.debug(format, *args)

    def _route(self, method: str) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        route = _ROUTES.get(path)
        try:
            body = self._body()
            if body is None:
                return
            if not self.server.admits(path, self.headers.get("Authorization", "")):
                self._error(HTTPStatus.UNAUTHORIZED, "Unauthorized: this server wants an API key.")
            elif route is None:
                self._error(HTTPStatus.NOT_FOUND, f"There is no {path}. Try {', '.join(sorted(_ROUTES))}.")
            elif method not in route[0]:
                self._error(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {' or '.join(route[0])}.")
            else:
                route[1](self, body)
        except BadRequestError as error:
            self._error(HTTPStatus.BAD_REQUEST, str(error))
        except EngineError as error:
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except OSError:
            raise  # the client is gone
        except Exception as error:
            log.exception("%s %s failed", method, path)
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _body(self) -> bytes | None:
        """The request's body; None when it was refused, and the connection with it."""
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self._error(HTTPStatus.LENGTH_REQUIRED, "Send the body with a Content-Length.")
            return None
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > _MAX_BODY:
            self.close_connection = True
            self._error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Content-Length {length} is not up to {_MAX_BODY} bytes.")
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            self._error(HTTPStatus.BAD_REQUEST, "The body is shorter than its Content-Length.")
            return None
        return body

    def generate(self, body: bytes) -> None:
        """Run prompts and answer when their dumps are published."""
        service, begun = self.server.service, time.monotonic()
        try:
            requests, many = parse_generate(body, service.limits, service.tokenize)
        except TokenMismatchError as error:
            service.engine.publisher.writer.publish_failure(error.rid, FailureReason.MISMATCH, str(error))
            raise
        service.engine.submit(requests)
        answers = [self._answer(request, begun) for request in requests]
        self._json(HTTPStatus.OK, answers if many else answers[0])

    def _answer(self, request: Request, begun: float) -> dict[str, Any]:
        detokenize = self.server.service.detokenize
        token: int | None = None
        finish: dict[str, Any] = {"type": "length", "length": int(request.want_token)}
        try:
            token = request.answer.result()
        except AbortedError:
            finish = {"type": "abort", "message": "Aborted"}
        answer: dict[str, Any] = {
            "text": "" if token is None or detokenize is None else detokenize(token),
            "output_ids": [] if token is None else [token],
            "meta_info": {
                "id": request.rid,
                "finish_reason": finish,
                "prompt_tokens": len(request.input_ids),
                "completion_tokens": 0 if token is None else 1,
                "cached_tokens": 0,
                "e2e_latency": time.monotonic() - begun,
            },
        }
        return answer

    def abort(self, body: bytes) -> None:
        """Abort one request, or all."""
        raw = parse_object(body)
        rid, everything = raw.get("rid"), raw.get("abort_all", False)
        if everything is not True and not isinstance(rid, str):
            raise BadRequestError('Send {"rid": "…"} or {"abort_all": true}.')
        self.server.service.engine.abort(None if everything is True else rid)
        self._send(HTTPStatus.OK, b"", "text/plain")

    def health(self, _body: bytes) -> None:
        """Whether the engine runs; nothing is generated."""
        running = self.server.service.engine.running
        self._send(HTTPStatus.OK if running else HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain")

    def health_generate(self, _body: bytes) -> None:
        """A real request of one token, as SGLang does it."""
        request = Request(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", own=None, input_ids=[0], want_token=True)
        engine = self.server.service.engine
        engine.submit([request])
        try:
            request.answer.result(_HEALTH_S)
        except (TimeoutError, AbortedError, EngineError):
            engine.abort(request.rid)
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain")
        else:
            self._send(HTTPStatus.OK, b"", "text/plain")

    def server_info(self, _body: bytes) -> None:
        """The server's settings, and those of the capture under ``hsjournal``."""
        service = self.server.service
        ours = service.server_info["hsjournal"] | {"in_flight": service.engine.in_flight()}
        self._json(HTTPStatus.OK, service.server_info | {"hsjournal": ours})

    def model_info(self, _body: bytes) -> None:
        """What model this is."""
        self._json(HTTPStatus.OK, self.server.service.model_info)

    def _error(self, status: HTTPStatus, message: str) -> None:
        self._json(status, {"error": {"message": message}})

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        # Head and body in one packet: the stock end_headers would send the head alone.
        self._headers_buffer.extend((b"\r\n", body))  # type: ignore[attr-defined]
        self.flush_headers()


_READ, _ASK = ("GET", "POST"), ("POST",)
_ROUTES: dict[str, tuple[tuple[str, ...], Callable[[Handler, bytes], None]]] = {
    "/generate": (_ASK, Handler.generate),
    "/abort_request": (_ASK, Handler.abort),
    "/health": (_READ, Handler.health),
    "/health_generate": (_READ, Handler.health_generate),
    "/server_info": (_READ, Handler.server_info),
    "/get_server_info": (_READ, Handler.server_info),
    "/model_info": (_READ, Handler.model_info),
    "/get_model_info": (_READ, Handler.model_info),
}
