"""Files as other tools leave them: made by plain torch.save or safetensors, without a journal and without hsjournal."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.runs import mask_of


@dataclass(frozen=True)
class States:
    """One sample's states: ids ``[N]``, aux ``k`` of ``[N, H]``, final ``[N, H]``."""

    ids: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """The loss mask that :func:`tests.helpers.runs.mask_of` says."""
        zeros, ones = mask_of(len(self.ids))
        return torch.tensor([0] * zeros + [1] * ones)

    def side_by_side(self) -> torch.Tensor:
        """The aux states per token, ``[N, kH]``."""
        return torch.cat(self.aux, dim=1)


def random_states(
    ids: array[int] | Sequence[int],
    *,
    num_aux: int = 3,
    hidden: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> States:
    """Random states of given tokens."""
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(len(ids), hidden, generator=draw).to(dtype) for _ in range(num_aux + 1)]
    return States(torch.tensor(list(ids)), tuple(tensors[:-1]), tensors[-1])


def as_specforge(s: States) -> dict[str, Any]:
    """SpecForge's keys."""
    return {
        "input_ids": s.ids,
        "loss_mask": s.mask,
        "hidden_state": s.final[None],
        "aux_hidden_state": s.side_by_side()[None],
    }


def as_incident(s: States) -> dict[str, Any]:
    """The incident's one file per sample: no mask, the aux states as a list."""
    return {"input_ids": s.ids[None], "hidden_states": list(s.aux), "hidden_state": s.final, "num_tokens": len(s.ids)}


def as_torchspec(s: States) -> dict[str, Any]:
    """TorchSpec's keys."""
    return {
        "data_id": "x",
        "input_ids": s.ids[None],
        "hidden_states": s.side_by_side()[None],
        "last_hidden_states": s.final[None],
        "packed_loss_mask": "1,2",
        "metadata": {"turns": [1, 2], "score": 0.5},
    }


def as_angelslim(s: States) -> dict[str, Any]:
    """AngelSlim's keys."""
    return {
        "input_ids": s.ids[None],
        "hidden_states": s.side_by_side()[None],
        "target_hiddens": s.final[None],
        "loss_mask": s.mask[None],
    }


def as_modelopt(s: States) -> dict[str, Any]:
    """ModelOpt's keys."""
    return {
        "input_ids": s.ids,
        "hidden_states": s.final,
        "aux_hidden_states": s.side_by_side(),
        "loss_mask": s.mask,
        "conversation_id": "c1",
        "hidden_states_prenorm": False,
    }


def save_folder(folder: Path, s: States) -> None:
    """A folder per sample, as the incident's server dumped it, with its ids beside."""
    folder.mkdir(parents=True)
    for number, tensor in enumerate(s.aux):
        torch.save(tensor, folder / f"aux_{number}.pt")
    torch.save(s.final, folder / "final.pt")
    torch.save(s.ids, folder / "input_ids.pt")


def save_speculators(path: Path, s: States) -> None:
    """speculators' file: ``[N, k + 1, H]``, the last of them pre-norm."""
    from safetensors.torch import save_file

    save_file({"token_ids": s.ids, "hidden_states": torch.stack([*s.aux, s.final], dim=1).contiguous()}, path)


def save(path: Path, content: dict[str, Any]) -> Path:
    """``torch.save``, folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def same(path: Path, s: States) -> bool:
    """Whether a file of our output holds exactly these states, ids and mask."""
    found = torch.load(path, weights_only=True)
    pairs = [
        (found["input_ids"], s.ids),
        (found["loss_mask"], s.mask),
        (found["hidden_state"], s.final[None]),
        (found["aux_hidden_state"], s.side_by_side()[None]),
    ]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time and bytes of every file below a folder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in files}
