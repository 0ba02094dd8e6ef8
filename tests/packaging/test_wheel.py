"""The built wheel works in a fresh environment, away from the checkout."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Installed:
    """A fresh environment with the wheel, and a folder that is no checkout to run it from."""

    bin: Path
    elsewhere: Path

    def run(self, *command: str | Path, rc: int = 0) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HSJOURNAL_", "PYTHON"))}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.elsewhere,
            env=environment | {"NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == rc, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, *arguments: str | Path, rc: int = 0) -> str:
        return self.run("python", *arguments, rc=rc)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--sdist",
        "--no-isolation",
        "--outdir",
        folder,
        REPOSITORY,
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    python = folder / "venv/bin/python"
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(install, check=True, timeout=60)
    # The heavy packages come from this environment; its own .pth files, the editable hsjournal's among them, don't count.
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return Installed(python.parent, elsewhere)


def test_code_comes_from_the_wheel(installed: Installed):
    where = installed.python("-c", "import hsjournal; print(hsjournal.__file__)").strip()
    assert Path(where).is_relative_to(installed.bin.parent)


def test_every_module_is_in_the_wheel(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "hsjournal", "migrations"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert {name if name.startswith("hsjournal/") else f"hsjournal/{name}" for name in tracked} <= packed
    assert not [name for name in packed if not name.startswith("hsjournal/")]


def test_sdist_carries_what_the_wheel_is_built_from(wheel: Path):
    (sdist,) = wheel.parent.glob("*.tar.gz")
    names = subprocess.run(["tar", "tzf", sdist], check=True, capture_output=True, text=True).stdout.splitlines()
    below = {name.split("/", 1)[1] for name in names}
    assert {"pyproject.toml", "LICENSE", "README.md", "hsjournal/__init__.py", "migrations/env.py"} <= below
    assert not [name for name in below if name.startswith((".venv", ".git/", "demo-run"))]


def test_version_is_the_packages_own(wheel: Path, installed: Installed):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == installed.python("-c", "import hsjournal; print(hsjournal.__version__)").strip()
    assert not [need for need in metadata.get_all("Requires-Dist", []) if "torch" in need and "extra ==" not in need]


def test_migrates_with_the_packaged_migrations(installed: Installed):
    run_dir = installed.elsewhere / "run"
    run_dir.mkdir()
    code = "from hsjournal.journal.migrate import migrations_folder; print(migrations_folder())"
    assert Path(installed.python("-c", code).strip()).is_relative_to(installed.bin.parent)
    revision = installed.python("-m", "hsjournal.journal.migrate", run_dir).strip()
    connection = sqlite3.connect(run_dir / "journal.db")
    try:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (revision,)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()
    assert {"run", "sample", "event", "state_count"} <= tables
    assert installed.python("-m", "hsjournal.journal.migrate", run_dir).strip() == revision


def test_command_answers(installed: Installed):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (command,) = project["scripts"]
    shown = installed.run(command, "--help")
    for name in ("run", "resume", "status", "verify", "serve"):
        assert name in shown
        assert "Usage" in installed.run(command, name, "--help")
