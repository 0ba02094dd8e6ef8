"""Everything that belongs beside a run's files, by format: brought up to date at every start and end, and on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hsjournal.catalogue import index, prompts_folder, torchspec
from hsjournal.config import Manifest, RunPaths
from hsjournal.journal.reading import Reading

NAMES = frozenset(
    {
        torchspec.DATASET, torchspec.MANIFEST, prompts_folder.ARROW, prompts_folder.INFO, prompts_folder.STATE,
    }
)  # fmt: skip
"""Files in an output folder that are no sample's: some trainers look for them there. The index is in the run directory."""


def bring_up_to_date(
    journal: Reading, manifest: Manifest, paths: RunPaths, fence: Callable[[], None] = lambda: None
) -> int:
    """Write the index, and what the format's trainer wants; how many samples the index has.

    Args:
        journal: of the run.
        manifest: of the run.
        paths: of the run.
        fence: raises :class:`FencedError` when something newer owns the run.

    Raises:
        UsageError: when what writes it is not installed.
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    write_for(manifest, journal, index.entries(journal), fence)
    return index.write_index(journal, paths.run_dir, fence)


def write_for(
    manifest: Manifest, journal: Reading, found: Iterable[index.Entry], fence: Callable[[], None] = lambda: None
) -> None:
    """Write what the trainer of the format wants beside the files.

    Args:
        manifest: names the format and the folder.
        journal: of the run.
        found: the files there.
        fence: as above.

    Raises:
        As :func:`bring_up_to_date`.
    """
    folder = Path(manifest.out_dir)
    if manifest.format == "torchspec":
        torchspec.write_manifest(found, folder, manifest.final_norm, fence)
    elif manifest.format == "speculators":
        prompts_folder.write_prompts(journal, folder, manifest.run_id, fence)
