"""Whose start a run directory is: a small file in it, written before the run begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hsjournal.catalogue.whole import replaced
from hsjournal.errors import SchemaError
from hsjournal.fleet.look import NAME


@dataclass(frozen=True, slots=True)
class Badge:
    """What a start wears.

    Args:
        fleet: the fleet's name.
        shard: ``i/n``.
        incarnation: the start's number; a later start of the shard has a higher one.
        host: the node's name.
        out: the output folder that the run directory was made with; None for the one inside it.
        store: where the number comes from: a folder, or empty for Ray's own store.
    """

    fleet: str
    shard: str
    incarnation: int
    host: str
    out: str | None = None
    store: str = ""

    def write(self, run_dir: Path) -> None:
        """Put it on, whole and durable.

        Raises:
            OSError: as the storage answers.
        """
        with replaced(run_dir / NAME) as file:
            file.write(json.dumps(asdict(self)).encode() + b"\n")

    @classmethod
    def read(cls, run_dir: Path) -> Badge | None:
        """The one that ``run_dir`` wears, if any.

        Raises:
            SchemaError: when it can't be read.
        """
        path = run_dir / NAME
        try:
            raw = json.loads(path.read_text())
            known = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in raw.items() if name in known})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            raise SchemaError(f"{path} can't be read: {error}", remedy="Name another folder with --base.") from None
