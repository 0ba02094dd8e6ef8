"""Captures hidden states in a stock SGLang server: the entry point of the group ``sglang.srt.plugins``.

SGLang calls :func:`register` in each of its processes. Without ``HSJOURNAL_HANDOVER_ROOT`` in the environment nothing
happens. With it, hooks watch a scheduler's model and forward passes; a hook never raises and never changes what SGLang
does: whatever goes wrong here ends as one sentence in the log and an ``error`` in the hand-over root.

The dumps' layers are named by ``HSJOURNAL_CAPTURE_LAYERS`` (``1,5,8``: the outputs of these layers, 0-based; by default of
1, L//2-1 and L-4). ``HSJOURNAL_CAPTURE_PRENORM=1`` keeps the final state from before the model's last norm.
``HSJOURNAL_GROUP_MODE=1`` lets the root's group read and delete dumps. ``HSJOURNAL_BOOT_ID`` is made here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hsjournal.capture.sglang_capture import Capture
from hsjournal.capture.sglang_setup import Settings, settings_from

log = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_PARALLEL = ("attn_tp_rank", "attn_cp_rank", "attn_cp_size", "pp_rank", "pp_size")
# Positions of LogitsProcessor.forward's arguments, `self` first: names changed between versions, places did not.
_HIDDEN, _BATCH, _AUX = (2, "hidden_states"), (4, "logits_metadata"), (5, "aux_hidden_states")


def register() -> None:
    """Register the hooks in this process, if it is one that has a scheduler."""
    settings = settings_from(os.environ)
    # The launcher and the detokenizer run plugins too; hooks there would only import the model's code.
    if settings is None or _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found,unused-ignore]
        HookRegistry,
        HookType,
    )

    hooks = Hooks(settings)
    for target, hook, kind in (
        (f"{_RUNNER}.load_model", hooks.after_load, HookType.AFTER),
        (f"{_RUNNER}.forward", hooks.around_forward, HookType.AROUND),
        ("sglang.srt.layers.logits_processor.LogitsProcessor.forward", hooks.before_logits, HookType.BEFORE),
        (f"{_SCHEDULER}.Scheduler.process_batch_result", hooks.after_result, HookType.AFTER),
        (f"{_SCHEDULER}.Scheduler.abort_request", hooks.after_abort, HookType.AFTER),
        (f"{_SCHEDULER}.Scheduler.get_init_info", hooks.after_init_info, HookType.AFTER),
        (f"{_SCHEDULER}.Scheduler.get_internal_state", hooks.after_internal_state, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


class Hooks:
    """The hooks of one process, and its capture once the model is loaded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._capture: Capture | None = None
        self._batch: Any = None

    def after_load(self, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """A model was loaded: decide whether it can be captured, and arrange it."""
        if getattr(runner, "is_draft_worker", False):
            return
        problem, version, args, parallel = self._settings.problem, "", {}, {}
        try:
            version, args, parallel = _version(), _server_args(), _parallel()
        except Exception as error:
            log.exception("hsjournal: SGLang's settings can't be read")
            problem = f"SGLang's settings can't be read ({type(error).__name__}: {error})"
        with _never_raise("arranging the capture"):
            # Before graphs are captured, so that they hold the aux states too.
            self._capture = Capture(self._settings, version, args, parallel, runner, problem)

    def around_forward(self, forward: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the batch as the scheduler made it: the one that a graph replays has lost the request ids."""
        if self._capture is None or getattr(runner, "is_draft_worker", False):
            return forward(runner, *args, **kwargs)
        self._batch = args[0] if args else kwargs.get("forward_batch")
        try:
            return forward(runner, *args, **kwargs)
        finally:
            self._batch = None

    def before_logits(self, *args: Any, **kwargs: Any) -> None:
        """A forward pass has its states: take ours."""
        batch, capture = self._batch, self._capture
        if batch is None or capture is None:
            return  # a graph is being captured, or kernels warmed up
        self._batch = None
        try:
            capture.take_pass(batch, _argument(args, kwargs, *_HIDDEN), _argument(args, kwargs, *_AUX))
        except Exception as error:  # an exception here would kill the scheduler, and the server with it
            log.exception("hsjournal: a forward pass was not captured")
            with _never_raise("giving up a forward pass"):
                capture.fail_pass(batch, error)

    def after_result(self, _result: Any, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """A batch's results were processed: some requests are finished."""
        capture = self._capture
        if capture is None or capture.idle:
            return
        with _never_raise("following finished requests"):
            for request in batch.reqs:
                if request.finished():
                    aborted = type(getattr(request, "finished_reason", None)).__name__ == "FINISH_ABORT"
                    capture.finished(str(request.rid), aborted=aborted)

    def after_abort(self, _result: Any, _scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        """A client aborted requests, or went away."""
        if self._capture is not None and not self._capture.idle:
            with _never_raise("following an abort"):
                self._capture.aborted(str(request.rid or ""), everything=bool(request.abort_all))

    def after_init_info(self, result: Any, *_args: Any, **_kwargs: Any) -> Any:
        """What the scheduler tells the HTTP process at start, and that says at ``/server_info``."""
        if self._capture is not None and isinstance(result, dict):
            with _never_raise("describing the capture"):
                return result | {"hsjournal": self._capture.about}
        return None

    def after_internal_state(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        """The same for each data-parallel rank, under ``internal_states`` of ``/server_info``."""
        with _never_raise("describing the capture"):
            if self._capture is not None and isinstance(getattr(result, "internal_state", None), dict):
                result.internal_state["hsjournal"] = self._capture.about


@contextmanager
def _never_raise(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("hsjournal: %s failed; the server goes on", doing)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _version() -> str:
    import sglang  # type: ignore[import-not-found,unused-ignore]

    return str(sglang.__version__)


def _server_args() -> dict[str, Any]:
    """SGLang's settings after all that it decided itself."""
    from sglang.srt import runtime_context  # type: ignore[import-not-found,unused-ignore]

    args = runtime_context.get_server_args()
    if hasattr(args, "resolved_dict"):  # 0.5.23
        return dict(args.resolved_dict())
    return dict(runtime_context.get_context().resolved_server_args_dict())


def _parallel() -> dict[str, int]:
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found,unused-ignore]

    parallel = get_parallel()
    found = {name: int(getattr(parallel, name)) for name in _PARALLEL}
    with contextlib.suppress(AssertionError):  # 0.5.17 makes no group for decode contexts where there is only one
        found["dcp_size"] = int(parallel.dcp_size)
    return found
