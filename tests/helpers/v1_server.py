"""A server of protocol v1, as the incident's: ``req_N`` with real ``torch.save`` files, counted, and no identity.

States follow from the token ids, so that a file with another sample's rows shows. A test says per request what goes
wrong; without that it is a good server.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

HIDDEN, LAYERS, CONTEXT = 32, (1, 3, 5), 4096


def states(ids: Sequence[int], source: int, hidden: int = HIDDEN) -> torch.Tensor:
    """Rows ``[len(ids), hidden]`` of source ``source`` (an aux index, or the number of aux layers for the final one)."""
    tokens = torch.tensor(list(ids), dtype=torch.float32)[:, None]
    return torch.sin(tokens * (source + 1) + torch.arange(hidden) / 7.0 + torch.arange(len(ids))[:, None])


@dataclass(eq=False)
class V1Call:
    """One request; ``nth`` counts those of its row, from 1."""

    server: V1Server
    rid: str
    ids: list[int]
    nth: int
    aborted: threading.Event = field(default_factory=threading.Event)

    @property
    def row(self) -> int | None:
        """Of the request id; the dump never says it."""
        middle = self.rid.split("-")[2:]
        return int(middle[0]) if len(middle) == 3 else None

    def dump(self, **changes: Any) -> Path:
        """Write the dump, changed as :meth:`V1Server.dump` can."""
        return self.server.dump(self.ids, **changes)


Behaviour = Callable[[V1Call], int]
"""Does what the server does and returns the HTTP status."""


def good(call: V1Call) -> int:
    """The dump, then the answer."""
    call.dump()
    return 200


class V1Server:
    """Serves in threads of this process.

    Args:
        root: where it writes.
        script: behaviour of the n-th request of a row, by ``(row, nth)``.
        pace: seconds that each request takes.
        tells_load: whether ``/get_load`` is there.
    """

    def __init__(
        self,
        root: Path,
        script: dict[tuple[int | None, int], Behaviour] | None = None,
        *,
        pace: float = 0.0,
        tells_load: bool = True,
    ) -> None:
        self.root, self.script, self.pace, self.tells_load = root, script or {}, pace, tells_load
        self.seed, self.port = 1, 0
        self.calls: list[V1Call] = []
        self.together: list[tuple[int, ...]] = []
        self.background: list[threading.Thread] = []
        self._count = 0
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()
        self._nth: Counter[int | None] = Counter()
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Its address, over all its lives."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin a life."""
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """End this life; the next one has another seed."""
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()
        self.seed += 1

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self.calls:
            call.aborted.set()
        self.stop()
        for thread in self.background:
            thread.join(10)

    def dump(
        self,
        ids: Sequence[int],
        *,
        rows: int | None = None,
        hidden: int = HIDDEN,
        dtype: torch.dtype = torch.float32,
        aux: int = len(LAYERS),
        meta: dict[str, Any] | None = None,
        tear: str = "",
        of: Sequence[int] | None = None,
    ) -> Path:
        """Write the next ``req_N``.

        Args:
            ids: of the request.
            rows: how many rows, if not all.
            hidden: columns.
            dtype: of the tensors.
            aux: how many aux layers.
            meta: content of meta.json, if not ``num_tokens``.
            tear: a file that is cut in half.
            of: whose rows are written instead.
        """
        with self._lock:
            folder = self.root / f"req_{self._count}"
            self._count += 1
        folder.mkdir()
        source = list(of if of is not None else ids)[: rows if rows is not None else None]
        for index in range(aux + 1):
            path = folder / (f"aux_{index}.pt" if index < aux else "final.pt")
            torch.save(states(source, index if index < aux else len(LAYERS), hidden).to(dtype), path)
            if path.name == tear:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        (folder / "meta.json").write_text(json.dumps(meta if meta is not None else {"num_tokens": len(source)}))
        (folder / "done").touch()
        return folder

    def soon(self, work: Callable[[], object], after: float) -> None:
        """Do something later, whatever became of the request."""

        def run() -> None:
            time.sleep(after)
            work()

        thread = threading.Thread(target=run, daemon=True)
        self.background.append(thread)
        thread.start()

    def restart(self, after: float, down: float) -> None:
        """Stop later, and start again when it has been down for a while."""

        def work() -> None:
            self.stop()
            time.sleep(down)
            self.start()

        self.soon(work, after)

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer one request."""
        rid, ids = str(body["rid"]), list(body["input_ids"])
        with self._lock:
            call = V1Call(self, rid, ids, 0)
            self._nth[call.row] += 1
            call.nth = self._nth[call.row]
            self.calls.append(call)
            self._running[len(ids)] += 1
            self.together.append(tuple(self._running.elements()))
        try:
            time.sleep(self.pace)
            status = self.script.get((call.row, call.nth), good)(call)
        finally:
            with self._lock:
                self._running[len(ids)] -= 1
        meta = {"id": rid, "prompt_tokens": len(ids), "finish_reason": {"type": "length"}}
        return status, {"text": "", "meta_info": meta} if status == 200 else {"error": {"message": "as asked"}}

    def load(self) -> int:
        """Requests that it works on."""
        with self._lock:
            return sum(self._running.values())


def _handler(server: V1Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            info = {
                "model_path": "a model", "version": "patched", "context_length": CONTEXT, "random_seed": server.seed,
                "disable_radix_cache": True, "max_total_num_tokens": 100_000,
            }  # fmt: skip
            if self.path == "/server_info":
                self._say(200, info)
            elif self.path == "/get_load" and server.tells_load:
                self._say(200, [{"dp_rank": 0, "num_reqs": server.load(), "num_waiting_reqs": 0}])
            else:
                self._say(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/generate":
                self._say(*server.generate(body))
                return
            for call in server.calls:
                if call.rid == body.get("rid"):
                    call.aborted.set()
            self._say(200, {})

        def _say(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client has gone

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
