"""The capture of one SGLang process: decided when its model is loaded, then fed by every forward pass."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import hsjournal
from hsjournal.capture.sglang_assembly import IDS, Assemblies, Assembly
from hsjournal.capture.sglang_pieces import NoPieceError, PassCopy, Pieces, PiecesError
from hsjournal.capture.sglang_rows import RowsError, RowSlice, our_slices, runs_of, split_tensors
from hsjournal.capture.sglang_setup import (
    Arrangement,
    Settings,
    arrange,
    describe,
    is_writer,
    prenorm_refusal,
    refusal_of,
)
from hsjournal.capture.writer import CaptureSettings, DumpWriter
from hsjournal.dump.protocol import ITEM_SIZE, FailureReason, RequestId
from hsjournal.errors import UsageError

log = logging.getLogger(__name__)

WAIT_S = 3.0
"""How long a forward pass may wait for the writers: far less than SGLang's watchdog, and once only."""
_ROOT_WAIT_S = 10.0


class Capture:
    """Captures, or refuses to in one sentence; either way the server serves on.

    Args:
        settings: from the environment.
        version: SGLang's.
        args: SGLang's resolved server arguments.
        parallel: sizes and ranks of this process.
        runner: the model runner whose model was just loaded.
        problem: why nothing can be captured, if that is known already.
    """

    def __init__(
        self,
        settings: Settings,
        version: str,
        args: Mapping[str, Any],
        parallel: Mapping[str, int],
        runner: Any,
        problem: str | None = None,
    ) -> None:
        self._settings = settings
        self.refusal = problem
        self._arrangement: Arrangement | None = None
        self._writes = is_writer(parallel)
        self._assemblies: Assemblies | None = None
        self._pieces: Pieces | None = None
        self._prenorm: Any = None
        try:
            self.refusal = problem or refusal_of(version, args, parallel)
            if self.refusal is None:
                # On every rank: all of them must run the same model.
                self._arrangement = arrange(runner, settings, version, args)
                self._start(version, args)
        except (UsageError, PiecesError) as error:
            self.refusal = str(error)
        except Exception as error:  # SGLang's insides are not ours: they may differ from what was read
            log.exception("hsjournal: arranging the capture failed")
            self.refusal = f"arranging the capture failed ({type(error).__name__}: {error})"
        if self.refusal is not None:
            log.error("hsjournal: capture is off: %s", self.refusal)
            self._start_refusing()

    @property
    def about(self) -> dict[str, Any]:
        """For ``/server_info``."""
        return describe(self._settings, self._arrangement, self.refusal)

    def take_pass(self, batch: Any, hidden: Any, aux: Any) -> None:
        """Take our rows out of a forward pass.

        Args:
            batch: the forward batch as the scheduler made it; not the padded copy that a graph replays, which has no ids.
            hidden: packed post-norm states.
            aux: packed or listed aux states.
        """
        prenorm, self._prenorm = self._prenorm, None
        if self._assemblies is None:
            return
        try:
            slices = our_slices(batch)
            if not slices:
                return
            if self.refusal is not None:
                for item in slices:
                    self._assemblies.refuse(item.rid, FailureReason.UNSUPPORTED, self.refusal)
                return
            admitted = {item: assembly for item in slices if (assembly := self._assemblies.admit(item)) is not None}
            if admitted:
                self._take(batch, prenorm if self._settings.prenorm else hidden, aux, admitted)
        except RowsError as error:
            self._fail_pass(batch, FailureReason.INTERNAL, str(error))

    def finished(self, rid: str, *, aborted: bool) -> None:
        """The server is done with a request."""
        ours = RequestId.parse(rid)
        if ours is not None and self._assemblies:
            self._assemblies.finished(ours, aborted=aborted)

    def aborted(self, prefix: str, *, everything: bool) -> None:
        """The server was told to abort requests."""
        if self._assemblies:
            self._assemblies.aborted(prefix, everything=everything)

    @property
    def idle(self) -> bool:
        """Whether no request of ours is known: then there is nothing to tell."""
        return not self._assemblies

    def fail_pass(self, batch: Any, error: Exception) -> None:
        """Something unforeseen happened while a pass was taken: its requests get an ``error``, the server goes on."""
        self._fail_pass(batch, FailureReason.INTERNAL, f"{type(error).__name__}: {error}")

    def _take(self, batch: Any, final: Any, aux: Any, admitted: Mapping[RowSlice, Assembly]) -> None:
        arrangement, pieces, assemblies = self._arrangement, self._pieces, self._assemblies
        assert arrangement is not None
        assert pieces is not None
        assert assemblies is not None
        if final is None:
            raise RowsError("the state before the final norm was not seen")
        rows = max(item.start + item.length for item in admitted)
        num_aux = len(arrangement.chosen.layers)
        tensors = split_tensors(final, aux, num_aux, arrangement.hidden_size, arrangement.torch_dtype, rows)
        ids = getattr(batch, "input_ids", None)
        if ids is None or ids.shape[0] < rows:
            raise RowsError("the forward batch has no token ids")
        copy = PassCopy(pieces, WAIT_S)
        try:
            for run in runs_of(list(admitted)):
                with_assemblies = [(admitted[item], item) for item in run]
                for index, tensor in [*enumerate(tensors), (IDS, ids)]:
                    copy.copy(index, tensor, with_assemblies)
                for item in run:
                    assemblies.took(item)
        except NoPieceError:
            detail = f"{self._settings.root} takes states more slowly than they are made: no buffer came free within {WAIT_S:.0f} s"
            self._fail_pass(batch, FailureReason.NO_ROOM, detail)
        finally:
            copy.finish()

    def _fail_pass(self, batch: Any, reason: FailureReason, detail: str) -> None:
        if self._assemblies is not None:
            for rid in getattr(batch, "rids", None) or ():
                if (ours := RequestId.parse(str(rid))) is not None:
                    self._assemblies.fail(ours, reason, detail)

    def _start(self, version: str, args: Mapping[str, Any]) -> None:
        arrangement = self._arrangement
        assert arrangement is not None
        if self._settings.prenorm:
            self.refusal = prenorm_refusal(args, arrangement.device.type)
            if self.refusal is not None:
                return
            arrangement.chosen.inner.norm.register_forward_hook(self._see_norm)
        if not self._writes:
            return
        row_bytes = arrangement.hidden_size * ITEM_SIZE[arrangement.dtype]
        pass_bytes = arrangement.pass_tokens * row_bytes * (len(arrangement.chosen.layers) + 1)
        self._pieces = Pieces(arrangement.device, pass_bytes, row_bytes)
        self._assemblies = Assemblies(self._open_root(version), self._pieces.settle)
        log.info(
            "hsjournal: capturing the outputs of layers %s into %s (SGLang's ids %s; %d buffers of %d MiB)",
            list(arrangement.chosen.layers), self._settings.root, list(arrangement.chosen.ids),
            self._pieces.count, self._pieces.size >> 20,
        )  # fmt: skip

    def _see_norm(self, _norm: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """The final norm returns (normed, residual stream), or was given the whole stream."""
        self._prenorm = output[1] if isinstance(output, tuple) else inputs[0]

    def _start_refusing(self) -> None:
        if not self._writes or not self._settings.root.is_absolute():
            return
        try:
            writer = self._open_root("")
        except UsageError as error:
            log.error("hsjournal: and no reason can be given to the client: %s", error)
            return
        self._assemblies = Assemblies(writer, _in_a_thread)

    def _open_root(self, version: str) -> DumpWriter:
        """The writer, made in a thread: a hand-over root on frozen storage must not keep the server from starting."""
        import torch

        a = self._arrangement
        capture = CaptureSettings(
            root=self._settings.root,
            capture_layers=a.chosen.layers if a else (),
            hidden_size=a.hidden_size if a else 1,
            dtype=a.dtype if a else "float32",
            final_norm="pre" if self._settings.prenorm else "post",
            boot_id=self._settings.boot_id,
            engine="sglang",
            versions={"hsjournal": hsjournal.__version__, "sglang": version, "torch": str(torch.__version__)},
            group_mode=self._settings.group_mode,
        )
        made: list[DumpWriter | UsageError] = []

        def make() -> None:
            try:
                made.append(DumpWriter(capture))
            except UsageError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="hsjournal-root", daemon=True)
        thread.start()
        thread.join(_ROOT_WAIT_S)
        if not made:
            raise UsageError(
                f"The hand-over root {self._settings.root} does not answer", remedy="Is its storage frozen?"
            )
        if isinstance(made[0], UsageError):
            raise made[0]
        return made[0]


def _in_a_thread(assembly: Assembly) -> None:
    threading.Thread(target=assembly.settle, name="hsjournal-refusal", daemon=True).start()
