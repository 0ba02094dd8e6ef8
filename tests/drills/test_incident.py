"""The incident replay, as ``scripts/drill incident`` runs it by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.drill.incident import incident_drill
from tests.helpers.tiny_models import make_tiny_model


@pytest.mark.root
def test_the_incident(tmp_path: Path) -> None:
    told = incident_drill(make_tiny_model("llama", tmp_path / "model", seed=3), tmp_path)
    print("\n".join(told.line))
    print(json.dumps(told.facts))
    assert told.faults == []
