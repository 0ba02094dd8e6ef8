"""Which modules a process loads: what import-linter can't see, since it stops at other people's packages."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hsjournal"
IN_A_SERVER = sorted(
    [*(PACKAGE / "capture").rglob("*.py"), PACKAGE / "dump/protocol.py", PACKAGE / "dump/unpublished.py"]
)
OURS_ALLOWED = (
    "hsjournal.capture", "hsjournal.dump.protocol", "hsjournal.dump.unpublished", "hsjournal.errors", "hsjournal.faults",
)  # fmt: skip
THEIRS_ALLOWED = sys.stdlib_module_names | {"torch", "transformers", "sglang"}


def imported(source: Path) -> set[str]:
    """Every module that `source` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            # `from hsjournal import faults` names a module, `from hsjournal.faults import point` doesn't.
            found |= {f"hsjournal.{a.name}" for a in node.names} if node.module == "hsjournal" else {str(node.module)}
    return found


def allowed(module: str) -> bool:
    top = module.partition(".")[0]
    if top != "hsjournal":
        return top in THEIRS_ALLOWED
    # The package itself holds the version only, and imports nothing.
    return module in {"hsjournal", "hsjournal.__version__"} or f"{module}.".startswith(
        tuple(f"{n}." for n in OURS_ALLOWED)
    )


@pytest.mark.parametrize("source", IN_A_SERVER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_runs_in_a_server_needs_nothing_else(source: Path):
    assert not [module for module in imported(source) if not allowed(module)]


LOADED = """
import importlib, json, pkgutil, sys, hsjournal
for room in {rooms!r}:
    module = importlib.import_module(room)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), room + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(*rooms: str) -> set[str]:
    """Modules in a fresh interpreter after importing every module of `rooms`."""
    code = LOADED.format(rooms=rooms)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_fast_path_loads_no_torch():
    rooms = ("mirror", "dump", "server", "sink", "journal", "worker", "watch", "ui", "cli")
    assert "torch" not in loaded_by(*(f"hsjournal.{room}" for room in rooms))


def test_the_supervisor_loads_neither_sqlmodel_nor_alembic_nor_the_worker():
    loaded = loaded_by("hsjournal.watch", "hsjournal.ui", "hsjournal.mirror")
    assert not loaded & {"torch", "sqlmodel", "alembic", "transformers", "hsjournal.worker"}


def test_the_process_that_supervises_a_run_loads_no_numpy():
    """It lives for days, and that would be a third of it."""
    assert "numpy" not in loaded_by("hsjournal.cli.main", "hsjournal.cli.job", "hsjournal.watch", "hsjournal.ui")


def test_worker_and_gate_start_without_an_orm():
    loaded = loaded_by("hsjournal.worker", "hsjournal.journal.gate", "hsjournal.journal.store", "hsjournal.reconcile")
    assert not loaded & {"torch", "sqlmodel", "sqlalchemy", "alembic", "pydantic", "transformers", "jinja2"}
