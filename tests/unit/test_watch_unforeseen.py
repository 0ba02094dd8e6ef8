"""An end that nobody foresaw is told like any other, and is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsjournal.config import SHM_VARIABLE, RunPaths, Settings
from hsjournal.errors import HsjournalError
from hsjournal.watch.notify import Addressees
from hsjournal.watch.supervisor import Job, Supervisor


def test_an_error_of_any_kind_is_told_as_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder in shared memory is somebody else's link: an OSError, long before the first worker."""
    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path / "shm"))
    paths = RunPaths.of(tmp_path / "run")
    paths.run_dir.mkdir()
    paths.shm.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    paths.shm.symlink_to(tmp_path / "elsewhere")
    told = tmp_path / "told"
    settings = Settings("http://127.0.0.1:9", str(tmp_path / "dumps"))
    job = Job(paths, settings, paths.default_out, notify=Addressees(command=f"cat >> {told}"))
    with pytest.raises(HsjournalError, match=r"nobody foresaw: PermissionError: .* \(mirror.py:\d+\)") as caught:
        Supervisor(job, lambda _view: None).run()
    assert "hsjournal resume" in str(caught.value)
    payload = json.loads(told.read_text())
    assert (payload["event"], payload["exit_code"]) == ("gave_up", 1)
    assert "PermissionError" in payload["sentence"]
