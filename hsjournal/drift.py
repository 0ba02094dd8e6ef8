"""What differs between what is asked of a run and what it was made for: a resume with anything else is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, Source
from hsjournal.errors import UsageError
from hsjournal.prompts.sources import expand, source_of
from hsjournal.prompts.spec import Reading

READING = "prompts."
"""Before the names of the options of :class:`hsjournal.prompts.spec.Reading` in a manifest."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says; None where it says nothing.

    Args:
        prompts: input files, folders and patterns.
        model: folder or name.
        layers: 0-based.
        dtype: None also for ``auto``.
        final_norm: ``pre`` or None.
        format: output layout.
        out_dirs: absolute.
        reading: those options of :class:`hsjournal.prompts.spec.Reading` that were said.
    """

    prompts: Sequence[Path] | None = None
    model: str | None = None
    layers: tuple[int, ...] | None = None
    dtype: str | None = None
    final_norm: str | None = None
    format: str | None = None
    out_dirs: Sequence[Path] | None = None
    reading: Mapping[str, Any] | None = None


def refuse_drift(manifest: Manifest, asked: Asked, run_dir: Path) -> None:
    """Refuse to go on with other prompts, model, layers, dtype, format or output than the run was made for.

    Raises:
        UsageError: listing every difference.
    """
    pairs: list[tuple[str, object, object]] = []
    if asked.prompts is not None:
        pairs.append(
            ("prompts", _said(manifest.sources), _said([source_of(Path(path)) for path in expand(asked.prompts)]))
        )
    if asked.model is not None:
        config = Path(asked.model) / "config.json"
        if config.is_file() and manifest.model_sha256:
            digest = hashlib.sha256(config.read_bytes()).hexdigest()
            pairs.append(
                (
                    "model",
                    f"{manifest.model_sha256[:12]}…",
                    f"{digest[:12]}… ({asked.model})" if digest != manifest.model_sha256 else f"{digest[:12]}…",
                )
            )
        else:
            pairs.append(("model", manifest.model, asked.model))
    if asked.layers is not None:
        pairs.append(("layers", list(manifest.capture_layers), list(asked.layers)))
    if asked.dtype not in (None, "auto"):
        pairs.append(("dtype", manifest.dtype, asked.dtype))
    if asked.final_norm is not None:
        pairs.append(("final norm", manifest.final_norm, asked.final_norm))
    if asked.format is not None:
        pairs.append(("format", manifest.format, asked.format))
    if asked.out_dirs is not None:
        pairs.append(("output folders", ", ".join(manifest.out_dirs), ", ".join(map(str, asked.out_dirs))))
    if asked.reading:
        had, now = Reading().frozen(), Reading(**asked.reading).frozen()
        names = {name: "--" + name.replace("_", "-") for name in asked.reading}
        pairs += [(flag, manifest.options.get(READING + name, had[name]), now[name]) for name, flag in names.items()]
    different = [f"{name}: the run was made with {had}, now asked is {now}" for name, had, now in pairs if had != now]
    if different:
        raise UsageError(
            f"{run_dir} was made for something else. " + "; ".join(different),
            remedy="Leave these options out to go on with the run as it is, or name a new run directory.",
        )


def refuse_used_output(out_dir: Path) -> None:
    """Refuse an output folder that holds anything: a new run must not mix with an old one.

    Raises:
        UsageError: naming it.
    """
    try:
        used = out_dir.exists() and any(out_dir.iterdir())
    except NotADirectoryError:
        raise UsageError(f"the output {out_dir} is a file", remedy="Name a folder with --out.") from None
    if used:
        raise UsageError(
            f"the output folder {out_dir} is not empty and belongs to no journal of this run",
            remedy="Name another with --out, or take its files over with `hsjournal adopt`.",
        )


def refuse_nested(out_dirs: Sequence[Path]) -> None:
    """Refuse output folders that are the same, or that lie within one another.

    Raises:
        UsageError: naming two of them.
    """
    real = [Path(os.path.realpath(folder)) for folder in out_dirs]
    for number, folder in enumerate(real):
        for other in real[:number]:
            if folder == other or folder in other.parents or other in folder.parents:
                raise UsageError(
                    f"the output folders {other} and {folder} are the same, or one lies in the other",
                    remedy="Name folders apart from each other with --out, one on each disk.",
                )


def _said(sources: Sequence[Source]) -> list[str]:
    return [f"{Path(s.path).name} ({s.nbytes:,} bytes, sha256 {s.sha256[:12]}…)" for s in sources]
