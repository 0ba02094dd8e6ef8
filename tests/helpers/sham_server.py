"""A program that starts and ends like a stock SGLang server, in bad manners too: it never serves a model.

Used only where it is about processes; whatever is about states runs against a real engine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"]
_ORPHAN = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
_OURS, _PRECIOUS = f"sglang_loads_sham_{os.getpid()}.shm", "sham-precious"


def main() -> None:
    """Run until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pids", type=Path, help="write the numbers of all processes here")
    parser.add_argument("--family", action="store_true", help="a child, one in its own session, and an orphan")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--shm", action="store_true", help="leave files in shared memory")
    parser.add_argument("--say", default="")
    parser.add_argument("--end", type=int, help="exit code, or minus a signal's number, after a while")
    parser.add_argument("--ready-after", type=float, default=0.2)
    options = parser.parse_args()
    sys.stdout.write(f"{options.say}\n")
    sys.stdout.flush()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid()]
    if options.family:
        pids += [subprocess.Popen(_SLEEP).pid, subprocess.Popen(_SLEEP, start_new_session=True).pid]
        made = subprocess.run([sys.executable, "-c", _ORPHAN, *_SLEEP], stdout=subprocess.PIPE, check=True)
        pids.append(int(made.stdout))
    if options.pids:
        fresh = options.pids.with_suffix(".new")
        fresh.write_text(" ".join(map(str, pids)))
        fresh.replace(options.pids)
    shm = [_mapped(name) for name in (_OURS, _PRECIOUS)] if options.shm else []
    if options.end is not None:
        time.sleep(0.5)
        if options.end < 0:
            os.kill(os.getpid(), -options.end)
        sys.exit(options.end)
    begun = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = time.monotonic() - begun > options.ready_after
            body = json.dumps({"model_path": "sham", "shm": [_OURS, _PRECIOUS]}).encode()
            body = b"" if self.path == "/health" else body
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(600)
    del shm


def _mapped(name: str) -> mmap.mmap:
    with (Path("/dev/shm") / name).open("w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


if __name__ == "__main__":
    main()
