"""The contract of engines, held by the embedded one; stock SGLang is held to the same in tests/integration/test_sglang_job.py."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine import running_engine
from tests.helpers.engine_contract import Engine, EngineContract
from tests.helpers.sglang_models import make_sglang_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests."""
    model = make_sglang_model("llama", tmp_path_factory.mktemp("llama"))
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hsjournal-test-"))
    try:
        with running_engine(model, folder / "root") as running:
            yield Engine(running.url, folder / "root", model, longest=2048)
            assert running.process.poll() is None, "the engine died on the way"
    finally:
        shutil.rmtree(folder)


class TestEmbedded(EngineContract):
    """All tests of the contract."""
