"""``status`` and ``diagnose`` without typer, whose import takes longer than their work; typer's own commands call the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsjournal.config import RunPaths
from hsjournal.ui.status import status_text
from hsjournal.watch.status import status

if TYPE_CHECKING:
    from hsjournal.ops.diagnose.foreign import Pipeline


def quick_status(arguments: Sequence[str]) -> bool:
    """Do ``status RUN_DIR [--json]``, or ``diagnose`` likewise, which ends with its own exit code.

    False for anything else, which typer reads, explains or refuses.
    """
    if not arguments or arguments[0] not in ("status", "diagnose"):
        return False
    words = [word for word in arguments[1:] if word != "--json"]
    if len(words) != 1 or words[0].startswith("-"):
        return False
    as_json = "--json" in arguments
    if arguments[0] == "diagnose":
        sys.exit(show_diagnosis(Path(words[0]), as_json=as_json))
    show_status(Path(words[0]), as_json=as_json)
    return True


def show_status(run_dir: Path, *, as_json: bool) -> None:
    """Print how a run stands.

    Raises:
        NoJournalError: when there is none.
    """
    state = status(RunPaths.of(run_dir))
    print(json.dumps(state) if as_json else status_text(state))


def show_diagnosis(run_dir: Path, *, as_json: bool) -> int:
    """Print what is the matter with a run; the exit code.

    Raises:
        NoJournalError: when there is none.
    """
    from hsjournal.ops.diagnose.run import diagnose

    return _show(diagnose(run_dir), as_json=as_json)


def show_foreign(pipeline: Pipeline, *, as_json: bool) -> int:
    """Print what is the matter with a pipeline that isn't ours; the exit code."""
    from hsjournal.ops.diagnose.foreign import diagnose_foreign

    return _show(diagnose_foreign(pipeline), as_json=as_json)


def _show(report: dict[str, Any], *, as_json: bool) -> int:
    from hsjournal.ui.diagnose import diagnose_text

    print(json.dumps(report) if as_json else diagnose_text(report))
    return int(report["exit_code"])
