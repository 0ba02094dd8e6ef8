"""What both sides of a server's start need: a free port, a first look over HTTP, and the error that names its last words."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any

from hsjournal.config import KEY_VARIABLE
from hsjournal.errors import ExitCode, ServerError


class LaunchError(ServerError):
    """The server ended, or did not get ready; the message holds its last words."""

    def __init__(self, message: str, remedy: str | None = None, exit_code: int = ExitCode.SERVER) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = ExitCode(exit_code) if exit_code in ExitCode.__members__.values() else ExitCode.SERVER


def fetch_json(url: str, timeout: float, *, empty: bool = False) -> dict[str, Any]:
    """GET a JSON object with the standard library; proxies are ignored, and the API key of the environment is sent.

    Args:
        url: the whole address.
        timeout: seconds.
        empty: take an answer without a body for an empty object.

    Raises:
        OSError: when nobody answers, or with an error status.
        ValueError: when the answer is not a JSON object.
    """
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    key = os.environ.get(KEY_VARIABLE, "")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    # No redirects: the key is for this server only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())
    try:
        with opener.open(request, timeout=timeout) as response:
            body = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url} does not speak HTTP: {error}") from error
    value = {} if empty and not body.strip() else json.loads(body)
    if not isinstance(value, dict):
        raise ValueError(f"{url} did not answer a JSON object")
    return value


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
