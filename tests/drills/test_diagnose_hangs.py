"""``diagnose`` where every read hangs: the children that it leaves behind, what it says meanwhile, and the GPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from hsjournal.birth import own_create_time
from hsjournal.config import Settings
from hsjournal.errors import ExitCode
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.ops.diagnose import glance
from hsjournal.ops.diagnose.asking import Asking
from hsjournal.ops.diagnose.looks import settings_of
from hsjournal.states import State
from tests.helpers.cli import Result, hsjournal
from tests.helpers.drill.stage import wait_for
from tests.helpers.runs import MadeRun, make_run

MOST_S = 2.0


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """A run whose manifest and log answer nobody, as on a network file system whose server is gone."""
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING])
    run.paths.manifest.unlink()
    run.paths.logs.mkdir(exist_ok=True)
    for path in (run.paths.manifest, run.paths.logs / "worker.log"):
        os.mkfifo(path)
    return run


def left_behind() -> list[int]:
    """Children of an examination that still look at something."""
    script = str(glance.__file__)
    return [p.pid for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or ())]


def test_it_answers_in_two_seconds_and_names_what_hangs(hanging: MadeRun) -> None:
    def asked() -> Result | None:
        """On a busy machine a child that has not begun yet says nothing of its disk."""
        done = hsjournal("diagnose", hanging.paths.run_dir, "--json")
        assert done.json()["took_s"] < 2 * MOST_S, "since the start of the process"
        return done if done.json()["hangs"] == ["the manifest", "the log"] and done.json()["took_s"] < MOST_S else None

    done = wait_for(asked, 60, "it names both, in time")
    report = done.json()
    assert (report["verdict"], done.code) == ("storage_stalled", ExitCode.ERROR)
    assert "can't be read: its storage hangs" in report["sentence"]
    assert "hangs in the kernel" in report["log"]["problem"]
    assert report["counts"]["verified"] == 1, "the journal answers, and is shown"
    text = hsjournal("diagnose", hanging.paths.run_dir).out
    assert "HANGS      the manifest, the log: not read" in text
    assert "worker.log: no answer in time" in text


def test_a_supervisor_that_waits_for_such_a_disk_is_shown_with_its_place(hanging: MadeRun) -> None:
    mirror = Mirror(hanging.paths.mirror)
    mirror.create()
    own = {"pid": os.getpid(), "create_time": own_create_time(), "stage": "waiting", "sentence": "the gate is closed"}
    mirror.write(SUPERVISOR, own | {"monotonic": time.monotonic()})
    report = hsjournal("diagnose", hanging.paths.run_dir, "--json").json()
    assert report["verdict"] == "storage_stalled"
    assert "the gate is closed" in report["sentence"]
    assert report["next_step"].startswith(f"Look at {hanging.paths.run_dir} (")


def test_children_that_were_left_behind_end_when_they_can(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_text("all is well")
    before = set(left_behind())
    asking = Asking()
    asking.ask({"stuck": ("text", str(fifo)), "well": ("text", str(tmp_path / "file")), "none": ("text", "/nowhere")})
    begin = time.monotonic()
    answers = asking.answers(begin + 1.0)
    assert time.monotonic() - begin < 1.5
    assert answers["stuck"]["hangs"]
    assert answers["well"]["text"] == "all is well"
    assert answers["none"]["missing"]
    while set(left_behind()) - before:
        assert time.monotonic() - begin < 20, "a child sleeps on"
        time.sleep(0.1)


def test_a_worker_is_known_by_its_command_line_that_a_child_reads() -> None:
    asking = Asking()
    asking.ask({"settings": ("text", f"/proc/{os.getpid()}/cmdline")})
    assert "\0" in asking.answers(time.monotonic() + 5.0)["settings"]["text"]
    settings = Settings(server_url="http://h:1", handover_root="/root")
    assert settings_of(f"python\0-m\0hsjournal.worker\0RUN\0--settings\0{settings.to_json()}\0") == settings
    assert settings_of("python\0--settings") is settings_of("") is None


@pytest.mark.parametrize(
    ("script", "gpus", "problem"),
    [
        ("echo '0, NVIDIA H200, 97, 120000, 143771'; echo '1, NVIDIA H200, 0, 5, 143771'", ["97", "0"], None),
        ("echo 'No devices were found'", [], None),
        ("echo broken >&2; exit 9", [], "does not answer"),
        ("exec sleep 60", [], "does not answer"),
    ],
)
def test_gpus_as_nvidia_smi_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: list[str], problem: str | None
) -> None:
    """A driver that hangs is told of in time; one that is not there is no error."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    begin = time.monotonic()
    found = glance.gpu("0.6")
    assert time.monotonic() - begin < 3
    assert [g["use_percent"] for g in found["gpus"]] == gpus
    assert all(g["memory_total_mib"] == "143771" for g in found["gpus"])
    assert (problem or "") in found.get("problem", "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert glance.gpu("0.6") == {"gpus": [], "problem": "no nvidia-smi on this machine"}
