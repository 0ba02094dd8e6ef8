"""Samples, dumps and the files made of them, for tests of the sink."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsjournal.dump.expect import Expectation
from hsjournal.dump.protocol import RequestId
from hsjournal.dump.reader import Dump, open_dump, open_root
from hsjournal.sink.formats import LAYOUTS
from hsjournal.sink.sample import OutputSample, Written
from hsjournal.sink.stream import Sink
from hsjournal.sink.verify import Method, verify_file
from tests.helpers.dumps import FabricatedDump, random_ids, write_dump

SPECFORGE = LAYOUTS["specforge"]


def ignore(phase: str, nbytes: int) -> None:
    """A progress callback that nobody looks at."""


@dataclass(frozen=True, slots=True)
class Made:
    """A dump and the sample that it answers."""

    dump: FabricatedDump
    sample: OutputSample
    root: Path

    @contextmanager
    def opened(self) -> Iterator[Dump]:
        """The dump as the worker opens it."""
        root_fd = open_root(self.root)
        s, meta = self.sample, self.dump.meta
        expect = Expectation(
            s.rid, s.num_tokens, s.hidden_size, s.dtype, s.capture_layers, s.final_norm, meta.token_ids_sha256
        )
        try:
            with open_dump(root_fd, s.rid, expect) as dump:
                yield dump
        finally:
            os.close(root_fd)


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of one test: a hand-over root, an output folder and a place for rejects."""

    base: Path

    @property
    def root(self) -> Path:
        """The hand-over root."""
        return self._folder("root")

    @property
    def out(self) -> Path:
        """The output folder."""
        return self._folder("out")

    @property
    def rejects(self) -> Path:
        """For files and dumps set aside; made by whoever needs it."""
        return self.base / "rejects"

    def _folder(self, name: str) -> Path:
        path = self.base / name
        path.mkdir(exist_ok=True)
        return path

    def make(
        self,
        num_tokens: int = 37,
        *,
        row: int = 7,
        attempt: int = 1,
        num_aux: int = 3,
        hidden: int = 64,
        dtype: str = "bfloat16",
        seed: int = 0,
        sample_id: str | None = None,
        **dump_options: Any,
    ) -> Made:
        """A dump in the root, and its sample."""
        rid = RequestId.sample("abcd", row, attempt, num_tokens)
        ids = random_ids(num_tokens, seed)
        dump = write_dump(self.root, rid, ids, num_aux, hidden, dtype, seed, **dump_options)
        ones = num_tokens // 3
        runs = array("I", [num_tokens - ones, ones] if ones else [num_tokens])
        sample = OutputSample(
            row=row,
            sample_id=sample_id or f"sample-{row}",
            run_id="abcd",
            rid=rid,
            input_ids=ids,
            loss_mask=runs.tobytes(),
            hidden_size=hidden,
            dtype=dtype,
            capture_layers=dump.meta.capture_layers,
            final_norm="post",
        )
        return Made(dump, sample, self.root)

    def sink(self, **options: Any) -> Sink:
        """A sink for SpecForge's format."""
        return Sink(self.out, SPECFORGE, self.rejects, **options)

    def write(self, made: Made) -> Written:
        """Write one sample."""
        sink = self.sink()
        try:
            with made.opened() as dump:
                return sink.write(dump, made.sample, ignore)
        finally:
            sink.close()

    def verify(self, made: Made, written: Written) -> Method:
        """Read one file back."""
        return verify_file(self.out, SPECFORGE, made.sample, written, ignore)

    def files(self) -> list[str]:
        """Every file below the output folder, hidden ones too."""
        return sorted(str(p.relative_to(self.out)) for p in self.out.rglob("*") if not p.is_dir())


def bits_of(tensor: Any) -> npt.NDArray[Any]:
    """A torch tensor's bits as numpy's unsigned integers, without the leading 1 of its shape."""
    import torch

    kinds: dict[int, tuple[Any, Any]] = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    signed, unsigned = kinds[tensor.element_size()]
    bits: npt.NDArray[Any] = tensor[0].view(signed).numpy().view(unsigned)
    return bits
