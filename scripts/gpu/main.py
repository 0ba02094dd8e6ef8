"""The command line of scripts/gpu-check."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from gpu import cost, job, numerics
from gpu.models import KINDS
from gpu.report import Report
from gpu.serving import Deadline, Platform, remove_leftovers, shm_names


def main() -> int:
    """Run one sub-check; 0 when it is good."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=sys.modules["__main__"].__doc__)
    parser.add_argument("check", choices=[*_CHECKS], help="what to check")
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.json, and for logs/ of the servers")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds that this call may take (default 530)")
    parser.add_argument("--models", default="", help=f"numerics: some of {','.join(KINDS)} (default: all)")
    parser.add_argument("--at-once", type=int, default=5, help="numerics: servers at a time (default 5)")
    parser.add_argument(
        "--shape", choices=[*cost.LOADS], default="8b", help="cost, job: shape of the model (default 8b)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="cost: interleaved rounds (default 5)")
    parser.add_argument("--variants", default=",".join(cost.VARIANTS), help="cost: which servers")
    parser.add_argument("--samples", type=int, default=320, help="job: samples (default 320)")
    parser.add_argument(
        "--disk", type=Path, default=Path.cwd(), help="job: folder on the storage to write to (default .)"
    )
    parser.add_argument("--sink-threads", type=int, default=2, help="job: of hsjournal run (default 2, as there)")
    parser.add_argument(
        "--verify", default="full,deferred", help="job: its --verify; a run for each (default full,deferred)"
    )
    parser.add_argument(
        "--beside-another", action="store_true", help="leave SGLang's files in /dev/shm: not all are ours"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with short prompts")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter that has SGLang")
    options = parser.parse_args()
    # An end from outside runs the finally blocks too, so that no server stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    platform = Platform(options.device, options.server_python, options.out / "logs")
    before = shm_names()
    try:
        report: Report = _CHECKS[options.check](options, platform, Deadline.after(options.limit))
        report.write(options.out)
    finally:
        if not options.beside_another:
            remove_leftovers(before)
    return 0 if report.good else 1


def _numerics(options: argparse.Namespace, platform: Platform, deadline: Deadline) -> Report:
    kinds = options.models.split(",") if options.models else list(KINDS)
    if platform.device == "cpu":
        plans = [numerics.Plan(kind, chunk=16, lengths=numerics.SHORT_LENGTHS) for kind in kinds]
    else:
        plans = [numerics.Plan(kind) for kind in kinds]
    return numerics.check("numerics", plans, options.at_once, platform, deadline)


def _tp2(options: argparse.Namespace, platform: Platform, deadline: Deadline) -> Report:
    kinds = options.models.split(",") if options.models else ["llama", "qwen3_moe", "deepseek_v3"]
    plans = [numerics.Plan(kind, ("--tp-size", "2")) for kind in kinds]
    return numerics.check("tp2", plans, options.at_once, platform, deadline)


def _dp2(_options: argparse.Namespace, platform: Platform, deadline: Deadline) -> Report:
    arguments = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    return numerics.check("dp2", [numerics.Plan("deepseek_v3", arguments)], 1, platform, deadline)


def _cost(options: argparse.Namespace, platform: Platform, deadline: Deadline) -> Report:
    variants = tuple(options.variants.split(","))
    return cost.check(cost.LOADS[options.shape], options.rounds, variants, platform, deadline)


def _job(options: argparse.Namespace, platform: Platform, deadline: Deadline) -> Report:
    policies = tuple(options.verify.split(","))
    return job.check(options.shape, options.samples, options.disk, options.sink_threads, policies, platform, deadline)


_CHECKS: dict[str, Any] = {"numerics": _numerics, "cost": _cost, "job": _job, "tp2": _tp2, "dp2": _dp2}
