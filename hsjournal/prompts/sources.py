"""From the names on the command line to sources: patterns, kinds of files by their first bytes, identities."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hsjournal import config
from hsjournal.errors import PromptsError
from hsjournal.prompts.readers import JsonLines, Source, need_pyarrow, unreadable
from hsjournal.prompts.tables import DatasetFolder, Parquet, dataset_files, identity_of

_PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
    b"ARROW1": ("an Arrow file", "Name the dataset folder around it, or write it as Parquet."),
    b"BZh": ("compressed with bzip2", "Unpack it with bunzip2, or pack it with gzip or zstd."),
    b"\xfd7zXZ": ("compressed with xz", "Unpack it with unxz, or pack it with gzip or zstd."),
    b"\xff\xfe": ("text in UTF-16", "Write it in UTF-8."),
    b"\xfe\xff": ("text in UTF-16", "Write it in UTF-8."),
}


def expand(names: Sequence[str | Path]) -> list[str]:
    """Files and folders from names and patterns (``data/*.jsonl``, ``**`` for any depth); each pattern's are sorted.

    Raises:
        PromptsError: when a pattern matches nothing.
    """
    found: list[str] = []
    for name in map(str, names):
        if os.path.lexists(name) or not glob.has_magic(name):
            found.append(name)
            continue
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise PromptsError(f"nothing matches {name}", remedy="Check the pattern (--prompts).")
        found += matches
    return found


def open_sources(files: Sequence[str]) -> list[Source]:
    """The sources of a run, checked as far as that goes without reading them.

    Each is named by its file name, or by the path as given where two files share one.

    Raises:
        PromptsError: when there is none, one stands twice, or one can't be used.
    """
    if not files:
        raise PromptsError("no prompts file is named", remedy="Name one with --prompts FILE.")
    real: dict[str, str] = {}
    for file in files:
        earlier = real.setdefault(os.path.realpath(file), file)
        if earlier is not file:
            raise PromptsError(f"{file} is named twice (as {earlier})", remedy="Name each prompts file once.")
    names = [os.path.basename(os.path.normpath(file)) for file in files]
    labels = [name if names.count(name) == 1 else file for name, file in zip(names, files, strict=True)]
    return [_open(Path(file), _printable(label)) for file, label in zip(files, labels, strict=True)]


def remedy_for(file: str) -> str:
    """What to do about prompts of which no line can be used."""
    if os.path.isfile(file):
        with open(file, "rb") as head:
            if head.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                return "It looks like one JSON array; write one object a line, as with `jq -c '.[]'`."
    return "Each line needs `conversations`, `messages`, `text`, or `input_ids` with `loss_mask` (--prompts)."


def source_of(path: Path) -> config.Source:
    """An input's size and SHA-256, streamed; as its source's own ``identity`` tells it.

    Raises:
        PromptsError: when it can't be read.
    """
    return identity_of(path, dataset_files(path) if path.is_dir() else [path])


def _open(path: Path, name: str) -> Source:
    """The source at ``path``; nothing but regular files and dataset folders are opened, as opening a pipe would wait."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return DatasetFolder(path, name)
        if not stat.S_ISREG(mode):
            raise PromptsError(
                f"{path} is not a regular file",
                remedy="Name a file of prompts: a resume must find the same bytes again.",
            )
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise unreadable(path, error) from None
    if not head:
        raise PromptsError(f"{path} is empty", remedy="Name a JSON Lines file with one prompt a line (--prompts).")
    if head.startswith(b"PAR1"):
        return Parquet(path, name)
    for magic, (kind, remedy) in _FOREIGN.items():
        if head.startswith(magic):
            raise PromptsError(f"{path} is {kind}, not JSON Lines", remedy=remedy)
    packing = next((packing for magic, packing in _PACKINGS.items() if head.startswith(magic)), "")
    if packing == "zstd":
        need_pyarrow(path, "compressed with zstd")
    return JsonLines(path, name, packing)


def _printable(name: str) -> str:
    """A file name as text that any encoder takes: bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
