"""Every row of every request, against float32 transformers: tiny models of each architecture, mixed lengths, chunks."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.models import VOCAB_SIZE, is_moe, reference_folder
from gpu.report import Bar, Report
from gpu.serving import SHM, CheckError, Deadline, Platform, Server, run_module, running, send, server_info
from hsjournal.dump.protocol import RequestId

RUN = "numer"
LENGTHS = (
    1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 500, 511, 512, 513, 777, 1000, 1023,
    1024, 1025, 1500, 2047, 2048, 2049, 3000, 4095, 4096, 4097, 6065, 8191, 8192,
)  # fmt: skip
SHORT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 100)
PAIR_TOKENS = 500
_ARRIVAL_S = 30.0
_DENSE_GOAL, _MOE_GOAL = 0.02, 0.04


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve and how.

    Args:
        kind: of ``gpu.models``.
        arguments: more of SGLang's.
        chunk: tokens of a prefill chunk.
        lengths: of the prompts.
    """

    kind: str
    arguments: tuple[str, ...] = ()
    chunk: int = 2048
    lengths: tuple[int, ...] = LENGTHS


def check(name: str, plans: Sequence[Plan], at_once: int, platform: Platform, deadline: Deadline) -> Report:
    """Judge each plan, ``at_once`` servers at a time."""
    report = Report(name)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_judge_plan, plan, Path(scratch), platform, deadline) for plan in plans]
        for plan, future in zip(plans, futures, strict=True):
            try:
                found = future.result()
            except CheckError as error:
                report.problems.append(f"{plan.kind}: {error}")
                continue
            report.details[plan.kind] = found
            _put(report, plan, found)
    return report


def _judge_plan(plan: Plan, scratch: Path, platform: Platform, deadline: Deadline) -> dict[str, Any]:
    begun = time.monotonic()
    model, log = scratch / plan.kind, scratch / f"{plan.kind}-program.log"
    run_module("gpu.models", plan.kind, str(model), deadline=deadline, log=log)
    root = Path(tempfile.mkdtemp(prefix=f"gpu-check-{plan.kind}-", dir=SHM))
    try:
        arguments = ["--chunked-prefill-size", str(plan.chunk), "--max-running-requests", "64", *plan.arguments]
        if platform.device == "cuda":
            # A pool that holds all that is in flight, and room for the other servers on the same GPU.
            arguments += ["--mem-fraction-static", "0.6", "--max-total-tokens", str(VOCAB_SIZE)]
        else:
            arguments += ["--mem-fraction-static", "0.3", "--max-total-tokens", "4096"]
        if plan.kind == "kimi_k25":
            arguments += ["--trust-remote-code"]
        environment = {"HSJOURNAL_HANDOVER_ROOT": str(root / "root")}
        with running(
            plan.kind, model, arguments, scratch=scratch, platform=platform, deadline=deadline, environment=environment
        ) as server:
            sent = _drive(plan, server, root / "root", deadline)
        spec = {"model": str(reference_folder(plan.kind, model)), "device": platform.device, "root": str(root / "root")}
        (scratch / f"{plan.kind}-spec.json").write_text(json.dumps(spec | sent["spec"]))
        out = scratch / f"{plan.kind}-result.json"
        run_module("gpu.reference", str(scratch / f"{plan.kind}-spec.json"), str(out), deadline=deadline, log=log)
        found = dict(json.loads(out.read_text()))
        del sent["spec"]
        print(f"[{plan.kind}] judged after {time.monotonic() - begun:.0f} s", flush=True)
        return found | sent | {"start_s": server.start_s, "prefill_graphs": server.prefill_graphs()}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _drive(plan: Plan, server: Server, root: Path, deadline: Deadline) -> dict[str, Any]:
    """Send everything; the specification for the reference, and what the server said of itself."""
    prompts = _prompts(plan.lengths)
    first = min(PAIR_TOKENS, max(plan.lengths))
    one, alone, together = (str(RequestId.sample(RUN, row, 1, first)) for row in (9000, 9001, 9002))
    pair_ids = next(ids for ids in prompts if len(ids) == first)
    # The first question: does a prompt that a prefill graph replays arrive at all (a graph's own batch has no ids)?
    send(server, [(one, pair_ids, 1)], 1, deadline.left(120))
    graph_first = "arrived" if _arrived(root, [one], deadline) else "nothing came"
    print(f"[{plan.kind}] first request, prefill graphs {server.prefill_graphs()}: {graph_first}", flush=True)
    send(server, [(alone, pair_ids, 1)], 1, deadline.left(120))
    requests = {str(RequestId.sample(RUN, row, 1, len(ids))): ids for row, ids in enumerate(prompts)}
    others = [(f"somebody-{n}", ids, 16) for n, ids in enumerate(prompts[::5])]
    mixed = [(rid, ids, 8 if row % 4 == 0 else 1) for row, (rid, ids) in enumerate(requests.items())]
    mixed += [*others, (together, pair_ids, 1)]
    random.Random(1).shuffle(mixed)  # noqa: S311 - a repeatable order
    _, seconds = send(server, mixed, 32, deadline.left(240))
    repeats = {one: pair_ids, alone: pair_ids, together: pair_ids}
    expected = {**requests, **repeats}
    _arrived(root, list(expected), deadline)
    foreign = sorted(p.name for p in root.iterdir() if p.name not in expected)
    about = server_info(server)
    return {
        "spec": {"requests": requests, "repeats": repeats, "pairs": [[one, alone], [alone, together]]},
        "seconds": seconds,
        "first_request": graph_first,
        "unexpected_in_root": foreign,
        "hsjournal": about.get("hsjournal"),
        "graph_settings": about.get("cuda_graph_config"),
    }


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts in which no token stands twice, in none of them: two rows can't be mistaken for each other."""
    tokens = list(range(256, VOCAB_SIZE))
    random.Random(0).shuffle(tokens)  # noqa: S311 - the same prompts every time
    assert sum(lengths) <= len(tokens)
    found, start = [], 0
    for length in lengths:
        found.append(tokens[start : start + length])
        start += length
    return found


def _arrived(root: Path, rids: Sequence[str], deadline: Deadline) -> bool:
    limit = time.monotonic() + deadline.left(_ARRIVAL_S)
    while missing := [rid for rid in rids if not (root / rid).is_dir()]:
        if time.monotonic() > limit:
            print(f"{len(missing)} dumps did not come: {missing[:3]}")
            return False
        time.sleep(0.05)
    return True


def _put(report: Report, plan: Plan, found: dict[str, Any]) -> None:
    report.problems += [f"{plan.kind}: {text}" for text in found["problems"]]
    report.problems += [f"{plan.kind}: {name} lies in the root" for name in found["unexpected_in_root"]]
    for name, t in found["tensors"].items():
        report.rows.append(
            {
                "model": plan.kind, "tensor": name, "rows": found["rows"], "requests": found["requests"],
                "chunks": found["most_chunks"], "graphs": found["prefill_graphs"], "median %": 100 * t["median"],
                "p99 %": 100 * t["p99"], "max %": 100 * t["max"], "flipped %": 100 * t["flipped_share"],
                "not own": t["not_their_own"], "nearest other %": 100 * t["nearest_other_row"],
            }
        )  # fmt: skip
    tensors = list(found["tensors"].values())
    if not tensors:
        report.problems.append(f"{plan.kind}: nothing was captured")
        return
    if not all(t["finite"] for t in tensors):
        report.problems.append(f"{plan.kind}: states that are not finite")
    if is_moe(plan.kind):
        report.bars.append(Bar(f"{plan.kind} worst median", max(t["median"] for t in tensors), _MOE_GOAL, "lower"))
    else:
        report.bars.append(Bar(f"{plan.kind} worst row", max(t["max"] for t in tensors), _DENSE_GOAL, "lower"))
    report.bars.append(Bar(f"{plan.kind} rows not their own", sum(t["not_their_own"] for t in tensors), 0, "lower"))
    for pair in found["alone_and_in_a_batch"]:
        if "problem" in pair:
            report.problems.append(f"{plan.kind}: {pair['problem']}")
            continue
        goal = _MOE_GOAL if is_moe(plan.kind) else _DENSE_GOAL
        worst = max(t["median"] if is_moe(plan.kind) else t["max"] for t in pair["tensors"].values())
        report.bars.append(Bar(f"{plan.kind} alone and in a batch", worst, goal, "lower"))
