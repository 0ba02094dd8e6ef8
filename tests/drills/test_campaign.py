"""The campaign at CI's size: at least 60 faults on real processes, 6 real freezes among them, and 400 in this process."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hsjournal.events import Event
from tests.helpers.drill import befalls, inprocess, verdicts
from tests.helpers.drill.inprocess import one_run
from tests.helpers.drill.mixed import campaign
from tests.helpers.drill.stall_book import Stalls
from tests.helpers.drill.truth import Findings
from tests.helpers.tiny_models import make_tiny_model


def test_faults_in_this_process() -> None:
    found = campaign(Path("no model is needed"), 0, 400, seed=11)
    assert found.lines() == []
    assert sum(found.in_process.values()) >= 400
    kinds = {kind.partition(":")[0].partition(" at ")[0] for kind in found.in_process}
    assert {"crash", "storage", "wrong dump", "late dump", "server restart", "damaged file", "judge", "poison"} <= kinds
    crashed = {kind.removeprefix("crash at ") for kind in found.in_process if kind.startswith("crash")}
    assert len(crashed) >= 15, "crashes at most of the named points"


@pytest.mark.root
@pytest.mark.timeout(900)
def test_faults_on_real_processes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("freezing a file system needs root")
    model = make_tiny_model("llama", tmp_path / "model", seed=3)
    found = campaign(model, 60, 0, seed=11, base=tmp_path)
    assert found.lines() == []
    assert sum(found.real.values()) >= 60
    assert found.freezes >= 6
    assert found.real["freeze"] >= 3, "so long that a verdict was due"
    assert found.real["stuck_thread"] >= 1
    assert len(found.called) >= 5, "stalls were called"
    assert len(found.real) >= 14, "of all kinds"


def test_the_campaign_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that does not look, a judge that is deaf or jumpy: each is found, under its own name."""
    from hsjournal.sink import output as output_module
    from hsjournal.sink.readback import Method
    from hsjournal.watch.verdict import Judge

    with monkeypatch.context() as blind:
        blind.setattr(output_module.Output, "verify", lambda *_: Method.DIRECT)
        blind.setattr(inprocess, "KINDS", ((befalls.damaged_file, 1),))
        findings = Findings()
        one_run(random.Random(1), 4, findings)
        assert findings.wrong

    patience = Judge.patience
    for factor, name in ((3.0, "missed_stalls"), (0.2, "false_stalls")):
        with monkeypatch.context() as other:
            other.setattr(Judge, "patience", lambda judge, look, f=factor: f * patience(judge, look))
            other.setattr(verdicts, "patience_of", patience)
            told = verdicts.stories(random.Random(1), 40)[1]
            assert [j for j in told if (j.missed_stall if name == "missed_stalls" else j.false_stall)]

    stalls = Stalls(allowed=[(10.0, 20.0)])
    assert stalls.false([5.0, 12.0, 25.0]) == [5.0, 25.0]
    assert stalls.false([12.0, 13.0]) == [13.0], "one fault excuses one stall"
    assert stalls.uncalled_for([12.0, 13.0, 30.0]) == [30.0]
    event = Event("stall", 5, {"verdict": "slow", "sentence": "row 5 at /out"})
    stalls.judge("a frozen disk", event, {"storage_stalled"}, "/out")
    stalls.judge("a frozen disk", event, {"slow"}, "/elsewhere")
    assert [("is called slow" in words, "/elsewhere" in words) for words in stalls.wrong] == [
        (True, False),
        (False, True),
    ]
