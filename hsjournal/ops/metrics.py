"""A run's figures for Prometheus, from its mirror alone: the text format, served over HTTP or kept as a text file.

``python -m hsjournal.ops.metrics RUN_DIR`` is a process of its own beside the supervisor: neither a scraper that never
hangs up nor a stuck disk under the text file can hold the run up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hsjournal.birth import lives
from hsjournal.config import RunPaths
from hsjournal.errors import UsageError
from hsjournal.lifeline import end_with_parent
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.states import State
from hsjournal.watch.figures import read_figures, read_worker
from hsjournal.watch.verdict import Verdict

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SOCKET_TIMEOUT = 10.0


class Lines:
    """Metrics in the text format: each family once, its samples together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, words: str, samples: Iterable[tuple[Mapping[str, object], float]]) -> None:
        """A family ``hsjournal_NAME`` of type ``kind``, each sample with its labels; none without samples."""
        drawn = [f"hsjournal_{name}{_labels(labels)} {float(value):.17g}" for labels, value in samples]
        if drawn:
            self._lines += [f"# HELP hsjournal_{name} {words}", f"# TYPE hsjournal_{name} {kind}", *drawn]

    def text(self) -> str:
        """The whole answer to a scrape."""
        return "\n".join(self._lines) + "\n"


def exposition(paths: RunPaths) -> str:
    """Everything that the mirror of a run tells now; what it can't tell is left out."""
    mirror = Mirror(paths.mirror)
    snapshot, supervisor, worker = read_figures(mirror), mirror.read(SUPERVISOR) or {}, read_worker(mirror.folder)
    lines = Lines()
    info = {
        "run_dir": str(paths.run_dir),
        "server": supervisor.get("server", ""),
        "out_dir": supervisor.get("out_dir", ""),
    }
    lines.family("run_info", "gauge", "The run that these figures are of.", [(info, 1)])
    alive = "pid" in supervisor and lives(int(supervisor["pid"]), float(supervisor["create_time"]))
    lines.family("supervisor_up", "gauge", "1 while a supervisor runs.", [({}, alive)])
    lines.family("worker_up", "gauge", "1 while a worker runs.", [({}, worker["alive"])])
    if "beat_age_s" in worker:
        age = worker["beat_age_s"]
        lines.family(
            "worker_beat_age_seconds", "gauge", "Since the worker's last sign of life; not progress.", [({}, age)]
        )
    lines.family(
        "workers_started_total", "counter", "Workers started by this supervisor.",
        [({}, supervisor["lives"])] if "lives" in supervisor else [],
    )  # fmt: skip
    _verdict(lines, supervisor.get("verdict"))
    if snapshot is not None:
        _snapshot(lines, snapshot)
    return lines.text()


def _verdict(lines: Lines, finding: object) -> None:
    if isinstance(finding, dict) and "verdict" in finding:
        samples = [({"verdict": name}, float(finding["verdict"] == name)) for name in map(str, Verdict)]
        lines.family("verdict", "gauge", "1 for what the supervisor holds the run for.", samples)


def _snapshot(lines: Lines, snapshot: Mapping[str, Any]) -> None:
    counts = snapshot["counts"]
    for key, words in (
        ("rows", "Rows in each state."),
        ("tokens", "Tokens of them."),
        ("bytes", "Bytes of their files."),
    ):
        lines.family(
            f"{key}", "gauge", words, [({"state": str(s)}, counts[str(s)][key]) for s in State if str(s) in counts]
        )
    lines.family("in_flight", "gauge", "Rows under way, by phase.", _by_phase(snapshot["in_flight"]))
    lines.family(
        "progress_age_seconds",
        "gauge",
        "Since a row last passed its own highest state.",
        [({}, snapshot["progress_age_s"])],
    )
    lines.family(
        "paused",
        "gauge",
        "1 for each thing that the run waits for.",
        [({"what": what}, 1) for what in snapshot.get("pauses", {})],
    )
    lines.family(
        "snapshot_age_seconds", "gauge", "Since the worker last told its figures.", [({}, snapshot["snapshot_age_s"])]
    )
    lines.family(
        "volume_free_bytes", "gauge", "Free on each output folder's disk.",
        [({"path": v["path"]}, v["free"]) for v in snapshot.get("volumes", []) if v["free"] is not None],
    )  # fmt: skip
    of_servers = [server.get("handover") or {} for server in snapshot.get("servers", ())]
    roots = {handover["root"]: handover for handover in of_servers if "root" in handover}  # servers may share one
    for key, words in (("reserved", "Promised to samples under way"), ("available", "Still free for samples")):
        lines.family(
            f"handover_{key}_bytes",
            "gauge",
            f"{words} in each hand-over root.",
            [({"root": root}, handover[key]) for root, handover in roots.items() if key in handover],
        )
    if snapshot.get("eta_s") is not None:
        lines.family(
            "eta_seconds", "gauge", "Until the last row, at the speed of the last minute.", [({}, snapshot["eta_s"])]
        )


def _by_phase(flights: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, object], float]]:
    found: dict[str, int] = {}
    for flight in flights:
        found[flight["phase"]] = found.get(flight["phase"], 0) + 1
    return [({"phase": phase}, count) for phase, count in sorted(found.items())] or [({"phase": "idle"}, 0)]


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    pairs = (
        f'{key}="{str(value).replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34)).replace(chr(10), chr(92) + "n")}"'
        for key, value in labels.items()
    )
    return "{" + ",".join(pairs) + "}"


def server(paths: RunPaths, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server that answers ``GET /metrics``; port 0 takes a free one.

    Raises:
        UsageError: when it can't listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _SOCKET_TIMEOUT

        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            body = exposition(paths).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are no news."""

    try:
        found = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"can't serve metrics at {host}:{port}: {getattr(error, 'strerror', None) or error}",
            remedy="Name a free port.",
        ) from None
    found.daemon_threads = True
    return found


def keep_textfile(paths: RunPaths, file: Path, every: float, stop: threading.Event) -> None:
    """Write the figures to ``file``, whole at any moment, every ``every`` seconds, until ``stop`` is set.

    The file is for node_exporter's textfile collector; one that can't be written now is tried again, and told of once.
    """
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    told = ""
    while True:
        words = f"metrics are kept in {file}"
        try:
            fresh.write_text(exposition(paths))
            fresh.replace(file)
        except OSError as error:
            words = f"metrics can't be written to {file}: {error.strerror}; tried again every {every:.0f} s"
        if words != told:
            told = words
            _say(words)
        if stop.wait(every):
            return


def main(arguments: list[str]) -> int:
    """Serve and keep, until the parent ends or a signal comes."""
    parser = argparse.ArgumentParser(prog="hsjournal-metrics")
    parser.add_argument("run_dir")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=-1, help="-1 for none")
    parser.add_argument("--textfile", type=Path)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--parent-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    if options.parent_fd >= 0:
        end_with_parent(options.parent_fd)
    serve(RunPaths.of(options.run_dir), options.host, options.port, options.textfile, options.every)
    return 0


def serve(paths: RunPaths, host: str, port: int, textfile: Path | None, every: float) -> None:
    """Serve at ``port`` (negative: not at all) and keep ``textfile`` (None: none), until interrupted.

    Raises:
        UsageError: as :func:`server`, or when there is nothing to do.
    """
    if port < 0 and textfile is None:
        raise UsageError("nothing to do", remedy="Name --metrics-port, --metrics-file, or both.")
    stop = threading.Event()
    if port < 0 and textfile is not None:
        keep_textfile(paths, textfile, every, stop)
        return
    with server(paths, host, port) as found:
        if textfile is not None:
            threading.Thread(
                target=keep_textfile, args=(paths, textfile, every, stop), name="textfile", daemon=True
            ).start()
        _say(f"metrics at http://{host}:{found.server_address[1]}/metrics")
        found.serve_forever()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(int(problem.exit_code))
