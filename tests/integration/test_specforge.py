"""SpecForge 0.2.0's own reader, store, normaliser and loader take an output folder as it is."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import RealRun

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LEN = 4096

pytestmark = pytest.mark.timeout(900)  # the first run builds SpecForge's environment


@dataclass(frozen=True, slots=True)
class Expected:
    """What one output file must hold: ids [N], mask [N], aux [N, 3 * H], final [N, H]."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """An output folder, and what its files must hold by their path below it."""

    folder: Path
    files: dict[str, Expected]


def read_with_specforge(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # -P: the script's own folder holds modules with the names of real packages.
    command = [python, "-P", str(REPOSITORY / "tests/helpers/specforge_read.py"), str(folder), str(MAX_LEN)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def samples_read(python: str, folder: Path) -> dict[str, dict[str, Any]]:
    done = read_with_specforge(python, folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line["path"] for line in lines}) == len(lines)
    return {line["path"]: line["tensors"] for line in lines}


def described(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": kind, "sha256": hashlib.sha256(raw).hexdigest()}


def normalised(expected: Expected) -> dict[str, dict[str, Any]]:
    """The sample as a training step sees it: a batch axis in front, and no loss on the last token."""
    mask = expected.mask.clone()
    mask[-1] = 0
    return {
        "input_ids": described(expected.ids[None]),
        "loss_mask": described(mask[None]),
        "attention_mask": described(torch.ones_like(mask)[None]),
        "hidden_state": described(expected.aux[None]),
        "target": described(expected.final[None]),
    }


def check_specforge_reads(output: Output, python: str) -> None:
    """Every file of `output` is listed, opens, and gives the very tensors that were captured."""
    assert samples_read(python, output.folder) == {path: normalised(what) for path, what in output.files.items()}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    """An output folder made by torch.save; rows of two groups, so that two folders are walked."""
    random = torch.Generator().manual_seed(7)
    files = {}
    for row, tokens in ((0, 5), (1, 1), (11, 33), (2000, 8)):
        what = Expected(
            ids=torch.randint(0, 49152, (tokens,), generator=random),
            mask=torch.randint(0, 2, (tokens,), generator=random),
            aux=torch.randn(tokens, 3 * 64, generator=random).to(request.param),
            final=torch.randn(tokens, 64, generator=random).to(request.param),
        )
        first = row // 2000 * 2000
        path = tmp_path / f"rows_{first}-{first + 2000}" / f"data_{row}.ckpt"
        path.parent.mkdir(exist_ok=True)
        content = {
            "input_ids": what.ids,
            "loss_mask": what.mask,
            "hidden_state": what.final[None],
            "aux_hidden_state": what.aux[None],
            "hsjournal": json.dumps({"sample_id": f"sample {row}"}),
        }
        torch.save(content, path)
        files[str(path.relative_to(tmp_path))] = what
    return Output(tmp_path, files)


def test_reads_every_sample_as_it_was_captured(output: Output, trainers_python: str):
    check_specforge_reads(output, trainers_python)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def drop_aux(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    del content["aux_hidden_state"]
    torch.save(content, path)


@pytest.mark.parametrize("harm", [cut, drop_aux])
@pytest.mark.parametrize("output", [torch.float32], indirect=True, ids=["float32"])
def test_refuses_a_damaged_file(output: Output, trainers_python: str, harm: Callable[[Path], None]):
    harm(output.folder / "rows_0-2000" / "data_1.ckpt")
    assert read_with_specforge(trainers_python, output.folder).returncode != 0


def test_reads_the_output_of_a_real_run(smollm2_run: RealRun, trainers_python: str):
    files = {}
    for path in smollm2_run.out_dir.rglob("*.ckpt"):
        data = torch.load(path, weights_only=True)
        name = str(path.relative_to(smollm2_run.out_dir))
        files[name] = Expected(
            data["input_ids"], data["loss_mask"], data["aux_hidden_state"][0], data["hidden_state"][0]
        )
    assert len(files) == 6
    check_specforge_reads(Output(smollm2_run.out_dir, files), trainers_python)
