"""The index and the vocabulary mapping on demand, also beside a live run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsjournal.catalogue.beside import bring_up_to_date
from hsjournal.catalogue.index import NAME, write_parquet
from hsjournal.catalogue.vocabulary import FILES, choose, count_tokens, write_mapping
from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import UsageError
from hsjournal.journal.reading import JournalReader
from hsjournal.ops.custody import need_output


@dataclass(frozen=True, slots=True)
class Made:
    """What was written.

    Args:
        samples: lines of the index.
        index: its path.
        mapping: path of the vocabulary mapping, None when none was asked for.
        coverage: share of the tokens that count for the loss which the draft's vocabulary has.
    """

    samples: int
    index: str
    mapping: str | None = None
    coverage: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def write(paths: RunPaths, *, parquet: bool = False, draft_size: int = 0, vocab_size: int = 0) -> Made:
    """Write them into the run directory, and beside the files what the format's trainer wants there.

    Args:
        paths: of the run.
        parquet: write the index as Parquet too.
        draft_size: of the draft model's vocabulary; 0 for no mapping.
        vocab_size: of the target's; 0 for what the manifest says.

    Raises:
        UsageError: when the mapping can't be made, or pyarrow is needed and not installed.
        NoJournalError: when there is no run.
        OSError: as the storage answers.
    """
    manifest = Manifest.load(paths.manifest)
    for folder in manifest.out_dirs:
        need_output(Path(folder))
    with JournalReader(paths.journal) as journal:
        mapping = None
        if draft_size:
            size = vocab_size or manifest.vocab_size
            if not size:
                raise UsageError("the server did not say how large the vocabulary is", remedy="Give --vocab-size.")
            mapping = choose(count_tokens(journal, size), draft_size)
            write_mapping(mapping, paths.run_dir)
        samples = bring_up_to_date(journal, manifest, paths)
        if parquet:
            write_parquet(journal, paths.run_dir)
    index = str(paths.run_dir / NAME)
    if mapping is None:
        return Made(samples, index)
    return Made(samples, index, str(paths.run_dir / FILES[0]), mapping.coverage)
