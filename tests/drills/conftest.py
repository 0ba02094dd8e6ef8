"""One embedded engine a module for the drills that attach their runs to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that every run of the module attaches to; a sample takes the module's ``PACE`` seconds, if it has one."""
    model = make_tiny_model("llama", tmp_path_factory.mktemp("served") / "model", seed=3)
    with attached.served(model, getattr(request.module, "PACE", 0.0)) as engine:
        yield engine


@pytest.fixture
def run(served: Served) -> Iterator[Attached]:
    """A run of 24 rows on the module's engine."""
    with attached.attached(served, 24) as run:
        yield run
