"""Puts the engine together; imports torch, so the cheap checks come before it."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# libgomp reads it when torch loads. Its threads otherwise spin while they wait: beside the client on the same cores that
# halves the throughput (measured), and alone it gains nothing at the size of a prefill.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers

import hsjournal
from hsjournal.capture.embedded.endpoints import Service
from hsjournal.capture.embedded.engine import Engine
from hsjournal.capture.embedded.model import TargetModel
from hsjournal.capture.embedded.requests import Limits
from hsjournal.capture.writer import CaptureSettings, DumpWriter
from hsjournal.dump.protocol import SCHEMA

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def start(
    options: argparse.Namespace, layers: Sequence[int] | None, boot_id: str, accepted: Callable[[str], None]
) -> tuple[Engine, Service]:
    """Load the model and open the root.

    Raises:
        UsageError: when either can't be used.
    """
    _keep_memory()
    if options.torch_threads:
        torch.set_num_threads(options.torch_threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = TargetModel(
        options.model,
        dtype=options.dtype,
        device=options.device,
        layers=layers,
        context_length=options.context_length,
        prenorm=options.capture_prenorm,
    )
    settings = CaptureSettings(
        root=options.handover_root.absolute(),
        capture_layers=model.capture_layers,
        hidden_size=model.hidden_size,
        dtype=model.dtype,
        final_norm="pre" if model.prenorm else "post",
        boot_id=boot_id,
        engine="embedded",
        versions={"hsjournal": hsjournal.__version__, **model.versions},
        group_mode=options.group_mode,
        room_wait_s=options.room_wait,
    )
    engine = Engine(
        model,
        DumpWriter(settings),
        max_batch_tokens=options.max_batch_tokens,
        writer_threads=options.writer_threads,
        accepted=accepted,
    )
    tokenizer = _load_tokenizer(options.model)
    service = Service(
        engine=engine,
        limits=Limits(model.vocab_size, model.context_length),
        server_info=_server_info(model, settings, options),
        model_info=_model_info(model),
        tokenize=None if tokenizer is None else lambda text: list(tokenizer(text).input_ids),
        detokenize=None if tokenizer is None else lambda token: str(tokenizer.decode([token])),
    )
    return engine, service


def _keep_memory() -> None:
    """Let glibc keep freed memory: each layer allocates the same big blocks, and mapping them anew costs a tenth."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):
        log.debug("no mallopt here")


def _load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, or None: ids are enough for everything but ``text``."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        log.info("no tokenizer in %s (%s): only input_ids can be run", folder, " ".join(str(error).split())[:200])
        return None


def _server_info(model: TargetModel, settings: CaptureSettings, options: argparse.Namespace) -> dict[str, Any]:
    """As SGLang's ``/server_info``, as far as it applies, and what the client wants to know of the capture."""
    return {
        "model_path": str(model.folder),
        "tokenizer_path": str(model.folder),
        "served_model_name": str(model.folder),
        "version": f"hsjournal-embedded-{hsjournal.__version__}",
        "dtype": model.dtype,
        "device": str(model.device),
        "context_length": model.context_length,
        "disable_radix_cache": True,
        "speculative_algorithm": None,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": options.max_batch_tokens,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "hsjournal": {
            "protocol": SCHEMA,
            "boot_id": settings.boot_id,
            "capture_layers": list(model.capture_layers),
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "dtype": model.dtype,
            "final_norm": settings.final_norm,
            "handover_root": str(settings.root),
            "engine": settings.engine,
            "versions": dict(settings.versions),
        },
    }


def _model_info(model: TargetModel) -> dict[str, Any]:
    return {
        "model_path": str(model.folder),
        "tokenizer_path": str(model.folder),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "model_type": model.model_type,
        "architectures": model.architectures,
    }
