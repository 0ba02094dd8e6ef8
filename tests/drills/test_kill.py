"""At least 80 kills, every named fault point among them: nothing lost, doubled, mixed up, re-sent needlessly or left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsjournal.faults import POINTS
from tests.helpers.drill import attached
from tests.helpers.drill.kill import kill_drill
from tests.helpers.drill.stage import ended, words
from tests.helpers.drill.truth import Findings
from tests.helpers.tiny_models import make_tiny_model


@pytest.mark.timeout(1800)
def test_eighty_kills(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", seed=3)
    report = kill_drill(model, 82, seed=11, base=tmp_path)
    assert report.findings.lines() == []
    assert report.kills >= 80
    assert set(report.points) == set(POINTS), "every named point has killed once"
    assert {"worker", "supervisor", "at"} <= set(report.targets)
    assert {"server", "all"} <= set(report.by_lane["embedded"]), "each with an engine that is the supervisor's child"


def test_the_drill_would_notice(tmp_path: Path) -> None:
    """What it looks for, done to a good run: each is found, and under its own name."""
    model = make_tiny_model("llama", tmp_path / "model", seed=3)
    with attached.served(model) as engine, attached.attached(engine, 6, tmp_path) as run:
        run.truth.seed_foreign()
        child = run.run()
        assert ended(child) == 0, words(child)
        run.check()
        files = sorted(run.stage.out_dir.rglob("*.ckpt"))
        content = files[0].read_bytes()

        def found() -> dict[str, int]:
            return {name: count for name, count in run.truth.judge(Findings()).counts().items() if count}

        files[0].unlink()
        assert found() == {"lost": 1, "wrong": 1}
        files[0].write_bytes(content)
        assert found() == {"wrong": 1}, "the same bytes, but not the same file"
        twin = files[1].with_name("data_77.ckpt")
        twin.write_bytes(files[1].read_bytes())
        assert found() == {"duplicated": 1, "wrong": 2}
        twin.unlink()
        middle = len(content) // 2
        files[0].write_bytes(content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :])
        assert found()["wrong"] >= 2
        files[0].write_bytes(content)

        rid = next(r for r in run.stage.received() if r.startswith(f"hsj-{run.truth.run_id}-3-"))
        with run.stage.rid_log.open("a") as log:
            log.write(f"{rid}\n{rid.replace('-3-1-', '-3-2-')}\n")
        assert found() == {"wrong": 2, "resent_needlessly": 2}, "the twin, once seen, is missed as well"
        (run.stage.root / "psm_x").write_bytes(b"")
        assert found() == {"wrong": 3, "resent_needlessly": 2}
        (run.stage.root / rid).mkdir()
        (run.stage.out_dir / ".hsjournal-gate").touch()
        findings = Findings()
        run.truth.check_left_over(findings)
        assert len([item for item in findings.left_over if rid in item or ".hsjournal-gate" in item]) == 2
