"""Operator schemas that torchvision expects, for a torch that it wasn't built against. For tests only.

torchvision's import registers fake kernels for two operators of its compiled part. That part doesn't load beside
this torch, so the import fails, and with it transformers' image code and SGLang. With the schemas there the import
passes; calling the operators would still fail, and nothing here does.

This module imports nothing of hsjournal's: it runs in SGLang's environment.
"""

from __future__ import annotations

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[object] = []  # a Library takes its definitions back when it is collected


def define() -> None:
    """Define the schemas; call it once, before torchvision is imported."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _kept.append(library)
