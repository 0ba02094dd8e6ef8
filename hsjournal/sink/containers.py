"""The containers by name: how one is composed, and how it is read without trusting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hsjournal.sink import safetensors_file, torch_zip
from hsjournal.sink.layouts import Container, Tensor, Value
from hsjournal.sink.pieces import Rows
from hsjournal.sink.safetensors_read import read_safetensors_file
from hsjournal.sink.torch_read import FormatError, ReadAt, StoredTensor, read_torch_file

__all__ = ["Codec", "FormatError", "StoredTensor", "codec_of"]


@dataclass(frozen=True, slots=True)
class Codec:
    """One container.

    Args:
        compose: the pieces of a file, from its keys and a call that gives the provenance.
        read: what a file holds by key, from a call that reads it and its size; raises :class:`FormatError`.
    """

    compose: Callable[[Sequence[Tensor | Value], Callable[[], dict[str, Any]]], Iterator[bytes | Rows]]
    read: Callable[[ReadAt, int], dict[str, Any]]


_CODECS = {
    Container.TORCH: Codec(torch_zip.compose, read_torch_file),
    Container.SAFETENSORS: Codec(safetensors_file.compose, read_safetensors_file),
}


def codec_of(container: Container) -> Codec:
    """How the container is written and read."""
    return _CODECS[container]
