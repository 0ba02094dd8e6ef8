"""The in-process part of the campaign: the real worker, store, reader and sink, a scripted server, faults of all kinds.

What must be true is kept here, outside the journal: what the server was asked for and handed over, and what each file
must hold. A run has a dozen rows and about as many faults, and is started anew after each crash, as a supervisor does.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import shutil
import tempfile
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from hsjournal.faults import InjectedError
from hsjournal.sink.formats import layout_named
from tests.helpers.drill.befalls import KINDS, LINKED, poison
from tests.helpers.drill.injector import Injector
from tests.helpers.drill.scene import FOREIGN, ROWS, Scene, Server
from tests.helpers.drill.truth import Findings
from tests.helpers.worker_runs import Run, states_of

SAMPLE_TIMEOUT = 1.0
MOST_LIVES = 40


def one_run(draw: random.Random, faults: int, findings: Findings) -> Counter[str]:
    """A run with about so many faults; the kinds of those that were armed."""
    folder = Path(tempfile.mkdtemp(prefix="hsj-c-", dir="/dev/shm"))
    try:
        run = Run(
            folder,
            [10 + (3 * row) % 17 for row in range(ROWS)],
            sample_timeout=SAMPLE_TIMEOUT,
            max_in_flight=draw.choice((1, 2, 4)),
        )
        for name in FOREIGN:
            (run.root / name).mkdir()
            (run.root / name / "done").touch()
        return asyncio.run(_play(run, draw, faults, findings))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _play(run: Run, draw: random.Random, faults: int, findings: Findings) -> Counter[str]:
    server = Server(run.root, findings)
    with Injector().installed() as inject:
        scene = Scene(run, server, inject, draw)
        makers, weights = zip(*KINDS, strict=True)
        chosen = draw.choices(makers, weights, k=faults)
        kinds: dict[int, str] = {}
        for maker in sorted(chosen, key=lambda m: m is not poison):  # no other fault may make its dumps right
            number = inject.begin()
            kinds[number] = maker(scene)
        async with server:
            code = await _live(scene, findings)
            missed = inject.disarm()
            scene.kinds.update(kind for number, kind in kinds.items() if number not in missed)
            await asyncio.gather(*server._tasks, return_exceptions=True)  # late dumps come now, if not before
            end = await run.work(server_url=server.url)  # and the next start clears them away
            if end.code != code:
                findings.wrong.append(f"the last start ended with {end.code}, not {code}: {end.sentence}")
            findings.wrong += [words for words in server.violations if "sent twice" in words]
            server.violations.clear()
    _judge(scene, findings)
    return scene.kinds


async def _live(scene: Scene, findings: Findings) -> int:
    """Start a worker again and again, until one ends by itself."""
    for _ in range(MOST_LIVES):
        try:
            end = await scene.run.work(server_url=scene.server.url)
        except InjectedError:
            continue
        except BaseExceptionGroup as group:
            if group.subgroup(InjectedError) is None:
                raise
            continue
        if end.error is None:
            return end.code
        if "the campaign at" not in end.sentence and "fault point" not in end.sentence:
            findings.wrong.append(f"a worker ended with {end.code}: {end.sentence}")
            return end.code
    findings.lost.append(f"not done after {MOST_LIVES} workers: {scene.run.states()}")
    return -1


def _judge(scene: Scene, findings: Findings) -> None:
    """Hold the end against what must be true, by the files themselves."""
    run = scene.run
    out = Path(run.manifest.out_dir)
    layout = layout_named("specforge")
    wanted = set()
    for row, (state, ids) in enumerate(zip(run.states(), run.ids, strict=True)):
        if row in scene.poison:
            if state != "failed":
                findings.wrong.append(f"row {row} is poison, and {state}")
            continue
        path = out / layout.path_of(row, f"sample-{row}")
        wanted.add(path)
        if state != "verified" or not path.exists():
            findings.lost.append(
                f"row {row} is {state}, file there: {path.exists()}; {dict(scene.kinds)}; {run.row(row)['reason']}"
            )
        elif problem := _content(path, ids):
            findings.wrong.append(f"row {row}: {problem}; {dict(scene.kinds)}")
    found = {path for path in out.rglob("*") if path.is_file()}
    findings.duplicated += [f"{path} is nobody's" for path in sorted(found - wanted)]
    for name in FOREIGN:
        if not (run.root / name / "done").exists():
            findings.wrong.append(f"{name} was not ours, and is gone")
    # What holds a link is never emptied, so it stays; and where it led to is not touched.
    left = {
        n
        for n in run.in_root()
        if n not in FOREIGN and n != LINKED and not any(p.is_symlink() for p in (run.root / n).iterdir())
    }
    findings.left_over += [f"{name} in the root; {dict(scene.kinds)}" for name in sorted(left)]


def _content(path: Path, ids: array[int]) -> str:
    arrays = states_of(ids)
    aux = np.concatenate([a for name, a in arrays.items() if name != "final"], axis=1)
    try:
        held = torch.load(path, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        return f"it can't be read: {str(error)[:80]}"
    if held["input_ids"].tolist() != list(ids):
        return "another row's ids"
    same = (held["hidden_state"][0].view(torch.uint16).numpy() == arrays["final"]).all()
    same &= (held["aux_hidden_state"][0].view(torch.uint16).numpy() == aux).all()
    return "" if same else "another row's states"
