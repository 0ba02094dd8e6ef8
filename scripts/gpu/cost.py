"""What capturing costs: the same requests to a server without it, with the package's plugin, and the incident's way."""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import incident
from gpu.models import write_shape
from gpu.report import Bar, Report
from gpu.serving import PLUGIN, SHM, CheckError, Deadline, Platform, Server, program_environment, running, send
from hsjournal.dump.protocol import RequestId

VARIANTS = ("off", "plugin", "incident")
_ARRIVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Args:
        shape: of ``gpu.models.write_shape``.
        requests: in a round.
        tokens: of a prompt, about.
        in_flight: at once; a round for each.
        pool_tokens: of the servers' KV pools, so that three fit on one GPU.
        least_rounds: fewer do not count.
    """

    shape: str
    requests: int
    tokens: int
    in_flight: tuple[int, ...]
    pool_tokens: int
    least_rounds: int = 3


LOADS = {
    "8b": Load("8b", 160, 2350, (16, 32), 100_000),
    "7168": Load("7168", 12, 32_000, (4, 8), 280_000, least_rounds=1),
    "tiny": Load("tiny", 10, 300, (4,), 4096),
}


@dataclass(slots=True)
class Side:
    """A variant's server, its root's consumer, and its rounds by requests in flight."""

    server: Server
    status: Path | None
    speeds: dict[int, list[float]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    row: int = 0


def check(load: Load, rounds: int, variants: tuple[str, ...], platform: Platform, deadline: Deadline) -> Report:
    """Measure; servers are all up, and take turns, so that whatever changes on the machine changes for all."""
    report = Report(f"cost-{load.shape}")
    usage = shutil.disk_usage(SHM)
    print(f"{SHM}: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        write_shape(load.shape, scratch / "model")
        try:
            sides = _start(load, variants, scratch, platform, deadline, stack)
            _rounds(load, rounds, sides, deadline, report)
        except CheckError as error:
            report.problems.append(str(error))
            sides = {}
        for name, side in sides.items():
            report.details[name] = {"speeds": side.speeds, "rates": side.rates, "start_s": side.server.start_s}
            report.details[name]["prefill_graphs"] = side.server.prefill_graphs()
        _put(report, load, sides)
    return report


def server_arguments(load: Load, platform: Platform) -> list[str]:
    """How every variant is served."""
    return [
        "--load-format", "dummy", "--chunked-prefill-size", "8192", "--max-running-requests", "64",
        "--mem-fraction-static", "0.9" if platform.device == "cuda" else "0.3",
        "--max-total-tokens", str(load.pool_tokens),
    ]  # fmt: skip


def _start(
    load: Load, variants: tuple[str, ...], scratch: Path, platform: Platform, deadline: Deadline, stack: ExitStack
) -> dict[str, Side]:
    """All servers at once; starting takes a minute or more each."""
    arguments = server_arguments(load, platform)
    roots = {name: Path(tempfile.mkdtemp(prefix=f"gpu-check-{name}-", dir=SHM)) for name in variants}
    for root in roots.values():
        stack.callback(shutil.rmtree, root, ignore_errors=True)

    def start(name: str) -> ExitStack:
        environment, plugins = {}, ()  # type: dict[str, str], tuple[str, ...]
        if name == "plugin":
            environment, plugins = {"HSJOURNAL_HANDOVER_ROOT": str(roots[name] / "root")}, (PLUGIN,)
        elif name == "incident":
            environment, plugins = {incident.ROOT_VARIABLE: str(roots[name])}, (incident.PLUGIN,)
        own = ExitStack()
        servers[name] = own.enter_context(
            running(
                name, scratch / "model", arguments, scratch=scratch, platform=platform, deadline=deadline,
                plugins=plugins, environment=environment,
            )
        )  # fmt: skip
        return own

    servers: dict[str, Server] = {}
    with ThreadPoolExecutor(len(variants)) as pool:
        futures = [pool.submit(start, name) for name in variants]
        problems = []
        for future in futures:
            try:
                stack.push(future.result())
            except CheckError as error:
                problems.append(str(error))
    if problems:
        raise CheckError("\n".join(problems))
    sides = {}
    for name in variants:
        status = None
        if name != "off":
            status = scratch / f"{name}-taken.json"
            start_consumer(name, roots[name] / "root" if name == "plugin" else roots[name], status, stack)
        sides[name] = Side(servers[name], status)
    return sides


def start_consumer(way: str, root: Path, status: Path, stack: ExitStack) -> None:
    """Take dumps away from ``root`` until ``stack`` unwinds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpu.consumer", way, str(root), str(status)], stdin=subprocess.DEVNULL,
        env=program_environment(),
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGKILL)


def _rounds(load: Load, rounds: int, sides: dict[str, Side], deadline: Deadline, report: Report) -> None:
    for side in sides.values():
        run_round(
            side, load, max(4, load.requests // 5), max(load.in_flight), deadline
        )  # kernels are tuned at first use
    longest = 0.0
    for number in range(rounds):
        begun = time.monotonic()
        if deadline.left() < 1.2 * longest + 15:
            print(f"time for {number} of {rounds} rounds")
            if number < load.least_rounds:
                report.problems.append(f"there was time for {number} rounds only")
            break
        for in_flight in load.in_flight:
            for name, side in sides.items():
                speed, rate = run_round(side, load, load.requests, in_flight, deadline)
                side.speeds.setdefault(in_flight, []).append(speed)
                side.rates.setdefault(in_flight, []).append(rate)
                print(
                    f"round {number}, {in_flight} in flight, {name}: {speed:,.0f} tok/s, {rate / 1e9:.2f} GB/s",
                    flush=True,
                )
        longest = max(longest, time.monotonic() - begun)


def run_round(side: Side, load: Load, count: int, in_flight: int, deadline: Deadline) -> tuple[float, float]:
    """Tokens per second until the last answer, and bytes of states per second until the last dump was taken.

    Raises:
        CheckError: when a dump is missing: a capture that drops some costs less.
    """
    draw = random.Random(side.row)  # noqa: S311
    requests = []
    for _ in range(count):
        tokens = load.tokens + draw.randrange(-load.tokens // 25, load.tokens // 25)
        rid = str(RequestId.sample("cost0", side.row, 1, tokens))
        requests.append((rid, [draw.randrange(1000, 100_000) for _ in range(tokens)], 1))
        side.row += 1
    before = _taken(side)
    begun = time.monotonic()
    _, seconds = send(side.server, requests, in_flight, deadline.left(240))
    speed = sum(len(ids) for _, ids, _ in requests) / seconds
    if before is None:
        return speed, 0.0
    limit = time.monotonic() + deadline.left(_ARRIVAL_S)
    while True:
        now = _taken(side)
        assert now is not None
        if now["failures"]:
            raise CheckError(f"captures failed: {sorted(set(now['failures']))[:3]}\n{side.server.tail()}")
        if now["dumps"] - before["dumps"] >= count:
            return speed, (now["bytes"] - before["bytes"]) / (time.monotonic() - begun)
        if time.monotonic() > limit:
            raise CheckError(f"{now['dumps'] - before['dumps']} of {count} dumps came\n{side.server.tail()}")
        time.sleep(0.02)


def _taken(side: Side) -> dict[str, Any] | None:
    if side.status is None:
        return None
    limit = time.monotonic() + 20
    while not side.status.exists():
        if time.monotonic() > limit:
            raise CheckError("the consumer of dumps did not start")
        time.sleep(0.05)
    return dict(json.loads(side.status.read_text()))


def _put(report: Report, load: Load, sides: dict[str, Side]) -> None:
    def median(name: str, in_flight: int) -> float:
        return statistics.median(sides[name].speeds[in_flight])

    for name, side in sides.items():
        row: dict[str, Any] = {"server": name}
        for n in load.in_flight:
            if n not in side.speeds:
                continue
            row[f"tok/s, {n} in flight"] = f"{median(name, n):,.0f}"
            row[f"of off, {n}"] = median(name, n) / median("off", n) if "off" in sides else 0.0
            row[f"GB/s, {n}"] = statistics.median(side.rates[n]) / 1e9
            row[f"rounds, {n}"] = len(side.speeds[n])
        report.rows.append(row)
    for n in load.in_flight:
        if not all(n in side.speeds for side in sides.values()) or "plugin" not in sides:
            continue
        if "off" in sides:
            report.bars.append(
                Bar(f"capture_vs_off, {n} in flight", median("plugin", n) / median("off", n), 0.99, "higher")
            )
        if "incident" in sides:
            report.bars.append(
                Bar(f"capture_vs_incident, {n} in flight", median("plugin", n) / median("incident", n), 1.8, "higher")
            )
        rate = statistics.median(sides["plugin"].rates[n]) / 1e9
        report.bars.append(Bar(f"GB/s of states, {n} in flight", rate, 1.0, "higher"))
