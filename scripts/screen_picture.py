"""Runs a small job with the embedded engine, keeps what its screen shows after a while, and draws that as SVG.

What was kept (FILE.json beside FILE.svg) is drawn again by a test: the picture is what the screen looks like today.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group

from hsjournal.config import RunPaths
from hsjournal.ui.frame import frame
from hsjournal.ui.history import History
from hsjournal.watch.onlooker import Onlooker
from hsjournal.watch.view import View
from tests.helpers.tiny_models import make_tiny_model

WIDTH, HEIGHT = 100, 30


def drawn(kept: dict[str, Any], width: int, height: int) -> str:
    """The SVG of a screen.

    Args:
        kept: ``view``, as a dictionary, and ``notes``, the snapshots before it.
        width: columns.
        height: lines.
    """
    history, view = History(), View(**kept["view"])
    for note in kept["notes"]:
        history.note(note)
    assert view.snapshot is not None
    view.snapshot["monotonic"] = time.monotonic() + 60  # or its ages would go on from when it was kept
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor", _environ={}
        )
        console.print(Group(*frame(view, history, width, height)))
    # Without the web fonts of the library's form: the picture loads nothing.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="hsjournal run", code_format=form, unique_id="screen")


def note_of(snapshot: dict[str, Any]) -> dict[str, Any]:
    """What a history takes from a snapshot."""
    counts = {"verified": {"tokens": snapshot["counts"]["verified"]["tokens"]}}
    return {"monotonic": snapshot["monotonic"], "counts": counts, "handover": snapshot.get("handover") or {}}


def main() -> int:
    """Run, look, draw, stop."""
    parser = argparse.ArgumentParser(prog="screen-picture")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the run before the picture is taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsjournal-") as name:
        folder = Path(name)
        os.environ["HSJOURNAL_SHM"] = name
        model = make_tiny_model("llama", folder / "model", seed=1)
        prompts = folder / "prompts.jsonl"
        rows = (
            {
                "id": f"sharegpt-{i}",
                "input_ids": list(range(3, 60 + i * 37 % 260)),
                "loss_mask": [1] * (57 + i * 37 % 260),
            }
            for i in range(4000)
        )
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "hsjournal.cli.main", "run", str(folder / "run"), "--quiet"]
        run = subprocess.Popen([*command, "--prompts", str(prompts), "--model", str(model)])
        try:
            notes, onlooker = list[dict[str, Any]](), Onlooker(RunPaths.of(folder / "run"))
            end, view = None, None
            while run.poll() is None and (end is None or time.monotonic() < end):
                view = onlooker.view()
                if view is not None and view.snapshot is not None:
                    end = end or time.monotonic() + options.seconds
                    notes.append(note_of(view.snapshot))
                time.sleep(0.5)
            if view is None or view.snapshot is None:
                sys.stderr.write("the run did not come that far\n")
                return 1
            view.run_dir, view.out_dir = "/data/runs/sharegpt", "/data/runs/sharegpt/out"
            for volume in view.snapshot.get("volumes", []):
                volume["path"] = view.out_dir
            kept = json.loads(json.dumps({"view": asdict(view), "notes": notes}).replace(name, "/models"))
            options.file.with_suffix(".json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            options.file.write_text(drawn(kept, options.width, options.height))
        finally:
            run.terminate()
            run.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
