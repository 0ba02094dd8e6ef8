"""The shell completes commands, options and paths: asked in a real bash, as --show-completion sets it up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("hsjournal")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("resu",), "resume"),
        (("fleet", "mer"), "merge"),
        (("resume", "RUN_DIR", "--max-i"), "--max-in-flight"),
        (("run", "RUN_DIR", "--notify-c"), "--notify-command"),
    ],
)
def test_what_is_begun_is_completed(typed: tuple[str, ...], offered: str, tmp_path: Path) -> None:
    words = " ".join(("hsjournal", *typed))
    asked = (
        f'PATH={SCRIPT.parent}:$PATH; eval "$(hsjournal --show-completion)"; '
        f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _hsjournal_completion hsjournal; echo "${{COMPREPLY[*]}}"'
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [offered], "")
