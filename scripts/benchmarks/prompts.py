"""Prompts into a journal: conversations tokenised a second, and the memory of all processes together at its peak."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import psutil
from bars import Bar, say, work_folder

from hsjournal.journal.migrate import migrate
from hsjournal.prompts.spec import IngestSpec

SEED = 7


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much."""
    parser.add_argument("--conversations", type=int, default=37_000, help="[default: 37,000]")
    parser.add_argument(
        "--model", type=Path, help="folder with tokenizer and template [default: scripts/smollm2-model]"
    )
    parser.add_argument("--processes", type=int, default=0, help="that tokenise [default: one for each processor]")


def run(options: argparse.Namespace) -> list[Bar]:
    """Ingest once, as a run's child does it."""
    model = options.model or Path(_printed([str(Path(__file__).parents[1] / "smollm2-model")]))
    with work_folder(options.folder, on_disk=True) as folder:
        prompts, journal = folder / "prompts.jsonl", folder / "journal.db"
        nbytes = write(prompts, options.conversations)
        say(f"{options.conversations:,} conversations, {nbytes / 1e6:,.0f} MB")
        migrate(journal)
        spec = IngestSpec(
            run_id="bench", files=(str(prompts),), model_dir=str(model), max_tokens=1 << 20, journal=str(journal),
            processes=options.processes,
        )  # fmt: skip
        result, seconds, busy, peak = measured(spec)
    note = f"{result['lengths']['total']:,} tokens in {seconds:,.0f} s; masks by {', '.join(result['methods'])}"
    return [
        Bar("prompts_per_s", result["rows"] / seconds, None, "higher", note),
        Bar(
            "prompts_per_cpu_s",
            result["rows"] / busy,
            None,
            "higher",
            "for each second of one processor, all processes",
        ),
        Bar("prompts_peak_mb", peak / 1e6, None, "lower", "resident, all processes together"),
    ]


def write(file: Path, conversations: int) -> int:
    """A file of conversations like those of a real run: about 2,300 tokens each, one to three answers; its bytes."""
    draw = random.Random(SEED)  # noqa: S311 - the same file every time
    texts = [text.strip() for text in topics.values() if len(text) > 400]
    with file.open("w", encoding="utf-8") as out:
        for n in range(conversations):
            turns = []
            for _ in range(draw.choice((1, 1, 2, 3))):
                text = draw.choice(texts)
                at, length = draw.randrange(len(text) - 200), int(draw.lognormvariate(8.45, 0.6))
                answer = (text[at:] + text * (length // len(text) + 1))[:length].strip()
                turns += [{"role": "user", "content": text[at : at + 200]}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"id": f"c{n}", "conversations": turns}) + "\n")
    return file.stat().st_size


def measured(spec: IngestSpec) -> tuple[dict[str, Any], float, float, int]:
    """The result, seconds from start to end, seconds of processors, and the most bytes that all processes held at once."""
    begin, used, peak = time.monotonic(), _processors(), 0
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "hsjournal.prompts.ingest", spec.to_json()], stdout=out, env=os.environ
        )
        family = psutil.Process(child.pid)
        while child.poll() is None:
            peak = max(peak, _resident(family))
            time.sleep(0.2)
        seconds = time.monotonic() - begin
        out.seek(0)
        last = json.loads(out.read().splitlines()[-1])
    if child.returncode != 0:
        raise SystemExit(f"bench: {last}")
    return last["result"], seconds, _processors() - used, peak


def _processors() -> float:
    """Seconds that children which ended, and theirs, had of processors."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _resident(family: psutil.Process) -> int:
    total = 0
    try:
        for process in (family, *family.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    return total


def _printed(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
