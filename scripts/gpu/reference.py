"""The states of prompts by transformers in float32, and how far a server's dumps are from them.

Run as a program (``python -m gpu.reference SPEC.json OUT.json``) after the server wrote its dumps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import DONE, ERROR, META, CaptureFailure, Meta, token_ids_sha256

FLIPPED = 0.10
"""Relative error from which a row of a mixture of experts is taken for one that went to other experts."""
_BLOCK = 4096


def compare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Compare every row of every dump.

    Args:
        spec: ``model`` (folder), ``device``, ``root``, ``requests`` (rid → token ids, no two alike),
            ``repeats`` (the same), ``pairs`` (two rids of one prompt).
    """
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    model = _load(spec["model"], spec["device"])
    requests: Mapping[str, Sequence[int]] = spec["requests"]
    problems: list[str] = []
    got: list[list[Any]] = []
    wanted: list[list[Any]] = []
    chunks = 0
    layers: tuple[int, ...] = ()
    names: list[str] = []
    for rid, ids in requests.items():
        found = _dump(Path(spec["root"]) / rid, rid, ids, spec["device"])
        if isinstance(found, str):
            problems.append(f"{rid}: {found}")
            continue
        meta, states = found
        chunks, layers = max(chunks, len(meta.chunks)), meta.capture_layers
        names = [t.name for t in meta.tensors]
        got.append(states)
        wanted.append(list(_states(model, ids, meta.capture_layers)))
    tensors: dict[str, Any] = {}
    for index, name in enumerate(names):
        tensors[name] = _judge(torch.cat([g[index] for g in got]), torch.cat([w[index] for w in wanted]))
    return {
        "requests": len(requests),
        "rows": sum(len(g[0]) for g in got),
        "problems": problems,
        "most_chunks": chunks,
        "capture_layers": list(layers),
        "tensors": tensors,
        "alone_and_in_a_batch": [_pair(spec, *pair) for pair in spec["pairs"]],
    }


def _load(folder: str, device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    config = AutoConfig.from_pretrained(folder)
    more = {"experts_implementation": "eager"} if "experts" in json.dumps(config.to_dict()) else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **more)
    return model.to(device).eval()


def _states(model: Any, ids: Sequence[int], layers: Sequence[int]) -> Iterator[Any]:
    """Outputs of ``layers``, then the post-norm final state: float32, ``[tokens, hidden]``."""
    import torch

    with torch.no_grad():
        tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
        out = model.model(tokens, output_hidden_states=True, use_cache=False)
    for k in layers:
        yield out.hidden_states[k + 1][0].clone()
    yield out.last_hidden_state[0].clone()


def _dump(folder: Path, rid: str, ids: Sequence[int], device: str) -> tuple[Meta, list[Any]] | str:
    """The dump's meta and tensors in float32, or what is wrong with it."""
    import torch

    if (folder / ERROR).exists():
        failure = CaptureFailure.from_json((folder / ERROR).read_bytes())
        return f"capture failed ({failure.reason.value}): {failure.detail}"
    if not (folder / DONE).exists():
        return "no dump arrived"
    meta = Meta.from_json((folder / META).read_bytes())
    if meta.rid != rid or meta.num_tokens != len(ids) or meta.token_ids_sha256 != token_ids_sha256(ids):
        return f"the dump is of other tokens ({meta.rid}, {meta.num_tokens} tokens)"
    tensors = []
    for entry in meta.tensors:
        raw = bytearray((folder / entry.file).read_bytes())
        if len(raw) != entry.nbytes:
            return f"{entry.file} has {len(raw)} bytes, not {entry.nbytes}"
        tensor = torch.frombuffer(raw, dtype=getattr(torch, meta.dtype)).view(entry.shape)
        tensors.append(tensor.to(device).float())
    return meta, tensors


def _judge(got: Any, wanted: Any) -> dict[str, Any]:
    """Errors by row, and whether each row is nearest to its own reference among those of all requests."""
    import torch

    length = wanted.norm(dim=1)
    error = (got - wanted).norm(dim=1) / length
    strangers, nearest_stranger = 0, float("inf")
    square = wanted.square().sum(1)
    for start in range(0, len(got), _BLOCK):
        rows = slice(start, start + _BLOCK)
        # |got - other|^2 without the rows' own term, which is the same for all
        distance = square[None, :] - 2 * (got[rows] @ wanted.T)
        own = torch.arange(start, start + len(distance), device=got.device)
        strangers += int((distance.argmin(dim=1) != own).sum())
        distance[torch.arange(len(distance)), own] = torch.inf
        best = (distance.min(dim=1).values + got[rows].square().sum(1)).clamp(min=0).sqrt() / length[rows]
        nearest_stranger = min(nearest_stranger, float(best.min()))
    finite = bool(torch.isfinite(got).all())
    error = torch.nan_to_num(error, nan=torch.inf)
    return {
        "median": float(error.median()),
        "p99": float(error.kthvalue(max(1, round(0.99 * len(error)))).values),
        "max": float(error.max()),
        "flipped_share": float((error > FLIPPED).float().mean()),
        "not_their_own": strangers,
        "nearest_other_row": nearest_stranger,
        "finite": finite,
    }


def _pair(spec: Mapping[str, Any], alone: str, together: str) -> dict[str, Any]:
    """How far the states of one prompt, captured twice, are from each other."""
    ids = {**spec["requests"], **spec["repeats"]}[alone]
    found = [_dump(Path(spec["root"]) / rid, rid, ids, spec["device"]) for rid in (alone, together)]
    if isinstance(found[0], str) or isinstance(found[1], str):
        return {"rids": [alone, together], "problem": str([f for f in found if isinstance(f, str)])}
    tensors = {}
    for entry, one, two in zip(found[0][0].tensors, found[0][1], found[1][1], strict=True):
        error = (one - two).norm(dim=1) / two.norm(dim=1)
        tensors[entry.name] = {
            "median": float(error.median()),
            "max": float(error.max()),
            "flipped_share": float((error > FLIPPED).float().mean()),
        }
    return {"rids": [alone, together], "tensors": tensors}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compare(json.loads(Path(sys.argv[1]).read_text())), indent=1))
