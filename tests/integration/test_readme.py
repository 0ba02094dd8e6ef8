"""The README's commands: every command block is run, or stands in a list with the reason; every command and option exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hsjournal.cli.app import app
from hsjournal.errors import ExitCode
from hsjournal.watch.notify import KINDS
from tests.helpers.cli import REPOSITORY, Result, hsjournal, started
from tests.helpers.sglang_server import free_port
from tests.helpers.tiny_models import make_tiny_model

README = (REPOSITORY / "README.md").read_text()

NOT_RUN = {
    "git clone": "this is the clone",
    "scripts/demo": "tests/integration/test_demo.py runs it, with fewer prompts",
    "python3 -m venv": "tests/packaging installs the wheel in an environment of its own",
    "pip install '.[": "downloads for minutes; tests/packaging installs the wheel",
    "HSJOURNAL_HANDOVER_ROOT=": "SGLang on a GPU; tests/integration/test_sglang_job.py runs it on the CPU",
    "hsjournal run RUN_DIR --prompts FILE --model MODEL_DIR --protocol v1": "a patched server; integration/test_v1_job.py",
    "scripts/check": "CI's own step",
    "scripts/test": "the test command itself",
    "hsjournal fleet run": "needs a cluster; tests/integration/test_fleet_*.py",
    "hsjournal fleet shard": "one of many; tests/integration/test_fleet_slurm.py starts them",
}
"""Beginnings of commands in blocks, and why no test runs them as they stand there."""


def blocks() -> Iterator[list[str]]:
    """Commands of each console block, continuation lines joined, comments off."""
    for body in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        joined = body.replace("\\\n", " ")
        yield [line[2:].split(" #")[0].strip() for line in joined.splitlines() if line.startswith("$ ")]


def commands() -> list[str]:
    """All of them, as if the environment were on the path."""
    return [command.removeprefix(".venv/bin/") for block in blocks() for command in block]


def is_exempt(command: str) -> bool:
    return any(command.startswith(beginning) for beginning in NOT_RUN)


def inline() -> list[str]:
    """Commands in running text, over line ends too."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    spans = [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]
    return [span for span in spans if span.startswith(("hsjournal ", "scripts/"))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the README's placeholders stand for."""
    folder = tmp_path_factory.mktemp("readme")
    model = make_tiny_model("llama", folder / "model", seed=9)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "{n}", "text": "some words, {n} of them"}}\n' for n in range(5)))
    (folder / "shm").mkdir()
    port = str(free_port())
    return {
        "RUN_DIR": str(folder / "run"), "NEW_RUN_DIR": str(folder / "new"), "MODEL_DIR": str(model),
        "prompts.jsonl": str(prompts), "shm": str(folder / "shm"), "DIR": str(folder / "dumps"), "30000": port,
        "http://127.0.0.1:30000": f"http://127.0.0.1:{port}", "DIR...": str(folder / "shard"),
        "index.jsonl": str(folder / "index.jsonl"), ".": str(REPOSITORY), "site": str(folder / "site"),
    }  # fmt: skip


class Reader:
    """Types what the README says; what it says of another shell runs on."""

    def __init__(self, place: dict[str, str]) -> None:
        self.place = place
        self.others: list[subprocess.Popen[bytes]] = []

    def types(self, command: str) -> Result:
        words = [self.place.get(word, word) for word in shlex.split(command)]
        if words[0] == "pip":
            target = ["--no-build-isolation", "--quiet", "--target", self.place["site"]]
            done = subprocess.run(
                [sys.executable, "-m", *words, *target], capture_output=True, text=True, check=False, timeout=240
            )
            return Result(done.returncode, done.stdout, done.stderr)
        assert words[0] == "hsjournal", f"{command!r} is neither run here nor listed in NOT_RUN"
        if words[1] == "serve":
            log = Path(self.place["shm"]).with_name("serve.log")
            self.others.append(started(*words[1:], log=log, HSJOURNAL_SHM=self.place["shm"]))
            return self._ready(log)
        return hsjournal(*words[1:], HSJOURNAL_SHM=self.place["shm"])

    def _ready(self, log: Path) -> Result:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(self.place["http://127.0.0.1:30000"] + "/health", timeout=5):
                    return Result(0, "", "")
            except OSError:
                if time.monotonic() > deadline or self.others[-1].poll() is not None:
                    return Result(1, "", log.read_text())
                time.sleep(0.2)

    def ends(self) -> None:
        for other in self.others:
            other.terminate()
            other.wait(30)


@pytest.fixture
def reader(place: dict[str, str]) -> Iterator[Reader]:
    reader = Reader(place)
    yield reader
    reader.ends()


def test_every_block_runs(reader: Reader) -> None:
    place = reader.place
    one = ("run", place["DIR..."], "--prompts", place["prompts.jsonl"], "--model", place["MODEL_DIR"], "--shard", "1/1")
    shard = hsjournal(*one, HSJOURNAL_SHM=place["shm"])
    assert shard.code == 0, shard.err
    told = [command for command in commands() if not is_exempt(command)]
    assert {"hsjournal serve", "hsjournal run", "hsjournal fleet", "pip install"} <= {
        " ".join(command.split()[:2]) for command in told
    }
    for command in told:
        done = reader.types(command)
        assert done.code == 0, (command, done.err)
    assert len(Path(place["index.jsonl"]).read_text().splitlines()) == 5  # of the merge
    plugin = [sys.executable, "-c", "import hsjournal.capture.sglang_plugin as p; print(p.__file__)"]
    found = subprocess.run(
        plugin, env={"PYTHONPATH": place["site"]}, cwd="/", capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(place["site"])


def test_the_python_block_runs(place: dict[str, str]) -> None:
    """On the run that the blocks before have made."""
    import torch

    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(block.replace("num_workers=4", "num_workers=0").replace('"RUN_DIR"', repr(place["RUN_DIR"])), names)
    assert len(names["data"]) == 5
    item = names["data"][0]
    said = re.search(r"^data\[0\]\s+# (.*?), mapped from the file$", block, re.MULTILINE)
    assert said
    assert set(re.findall(r"[a-z_]{2,}", said[1])) <= set(item)
    assert sum(len(batch["row"]) for batch in names["loader"]) == 5


def table(beginning: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    found = re.search(rf"^{re.escape(beginning)}.*?(?=\n\n)", README, re.MULTILINE | re.DOTALL)
    assert found, beginning
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[0].splitlines()]


def test_the_exit_codes_are_all_there() -> None:
    codes = [int(code) for first, *_ in table("| | |\n|---|---|\n| 0 |")[2:] for code in first.split(" / ")]
    assert sorted(codes) == sorted(ExitCode)
    words = table("| | |\n|---|---|\n| 0 |")
    assert dict(words[2:])["13"].startswith("server")


def test_the_notices_are_all_there() -> None:
    (said,) = re.findall(r"tell somebody, once\s+each[^:]*: (.*?)\.\s+A command", README, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == set(KINDS)


def test_the_extras_exist() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r"'\.\[([\w,]+)\]'", README) for name in group.split(",")}
    assert named >= {"embedded", "gpu", "parquet", "ray", "slurm"}
    assert named <= set(extras)


def test_the_list_holds_no_stale_exemption() -> None:
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands()), beginning


def test_every_command_and_option_in_the_text_exists() -> None:
    group: Any = typer.main.get_command(app)
    wrong = []
    for text in [*inline(), *commands()]:
        words = text.replace("…", "").split()
        if words[0].startswith("scripts/"):
            if not (REPOSITORY / words[0]).exists():
                wrong.append(text)
            continue
        if words[0] != "hsjournal":
            continue
        command, rest = group, words[1:]
        while rest and hasattr(command, "commands"):
            name, *rest = rest
            command = command.commands.get(name.split("|")[0])
        if command is None:
            wrong.append(text)
            continue
        handed_on = group.commands["run"].params if "fleet" in words and command.name in ("run", "shard") else []
        known = {
            option
            for parameter in [*getattr(command, "params", []), *handed_on]
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.split("=")[0].strip("[]") for word in rest if word.strip("[").startswith("--")}
        if used - known - {"--help"}:
            wrong.append(f"{text}: {sorted(used - known)}")
    assert not wrong


def test_every_test_named_there_exists() -> None:
    named = re.findall(r"`((?:unit|contract|property|integration|drills|packaging)/test_\w+\.py)(?:::(\w+))?`", README)
    assert len(named) > 10
    for path, function in named:
        file = REPOSITORY / "tests" / path
        assert file.is_file(), path
        assert not function or f"def {function}(" in file.read_text(), (path, function)


def test_every_file_named_there_exists() -> None:
    for name in re.findall(r"`((?:hsjournal|scripts|tests|migrations)/[\w./-]+)`", README):
        assert (REPOSITORY / name).exists() or (Path(REPOSITORY / name).parent / f"{Path(name).name}.py").exists(), name
