"""The picture in the README: what the live screen draws today of the run that was kept beside it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_the_picture_is_what_the_screen_draws_today() -> None:
    spec = importlib.util.spec_from_file_location("screen_picture", SCRIPTS / "screen_picture.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = json.loads((SCRIPTS / "screen.json").read_text())
    now = script.drawn(kept, script.WIDTH, script.HEIGHT)
    assert _timeless(now) == _timeless((SCRIPTS / "screen.svg").read_text()), "draw it anew: scripts/screen-picture"
    text = re.sub(r"<[^>]*>", "", now)
    for word in ("hsjournal", "running", "verified", "samples/s", "in", "flight", "disk"):
        assert word in text
    assert "url(" not in re.sub(r"url\(#", "", now), "it loads something"


def _timeless(picture: str) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "00:00:00", picture)
