"""Where a run keeps its things, what is frozen in its manifest, and what may change between two starts."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w

from hsjournal.errors import NoJournalError, SchemaError

SHM_VARIABLE = "HSJOURNAL_SHM"
"""Environment variable with the tmpfs folder under which mirrors and default hand-over roots are made."""


KEY_VARIABLE = "HSJOURNAL_API_KEY"
"""Environment variable with the servers' API key: the way that the key takes to every child of ours."""
DRAFT_CONFIG = "draft_config"
"""The manifest's option with the line for a draft model's ``config.json`` that makes SGLang serve the same layers."""
LAUNCH = "launch"
"""The manifest's option with the command line of a server of our own that is not the embedded engine."""
MORE_SERVERS = "more_servers"
"""The manifest's option that names the second server and those after it."""
MORE_OUT = "more_out"
"""The manifest's option that names the second output folder and those after it."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The places of one run; nothing here touches a disk."""

    run_dir: Path

    @classmethod
    def of(cls, run_dir: Path | str) -> RunPaths:
        """The places of the run directory ``run_dir`` (made absolute; links are not resolved)."""
        return cls(Path(os.path.abspath(run_dir)))

    @property
    def journal(self) -> Path:
        """The SQLite database. Never opened except through SQLite."""
        return self.run_dir / "journal.db"

    @property
    def manifest(self) -> Path:
        """The frozen settings."""
        return self.run_dir / "manifest.toml"

    @property
    def settings(self) -> Path:
        """What the last start was told of that which may change."""
        return self.run_dir / "settings.toml"

    @property
    def logs(self) -> Path:
        """Log files, one per process."""
        return self.run_dir / "logs"

    @property
    def rejects(self) -> Path:
        """The last few refused dumps and files that were in the way."""
        return self.run_dir / "rejects"

    @property
    def default_out(self) -> Path:
        """Output folder when none is named."""
        return self.run_dir / "out"

    @property
    def supervisor_lock(self) -> Path:
        """Locked by the supervisor, and by commands that change the journal; never unlinked."""
        return self.run_dir / "supervisor.lock"

    @property
    def worker_lock(self) -> Path:
        """Locked by a worker for its life; never unlinked."""
        return self.run_dir / "worker.lock"

    @property
    def shm(self) -> Path:
        """The run's folder in tmpfs: readable also while the run directory's disk is stuck."""
        name = hashlib.sha256(os.fsencode(self.run_dir)).hexdigest()[:16]
        return Path(os.environ.get(SHM_VARIABLE, "/dev/shm")) / f"hsjournal-{os.getuid()}" / name  # noqa: S108

    @property
    def mirror(self) -> Path:
        """Heartbeat, last snapshot, recent events."""
        return self.shm / "mirror"

    @property
    def default_handover_root(self) -> Path:
        """Hand-over root when none is named."""
        return self.shm / "dumps"


@dataclass(frozen=True, slots=True)
class Source:
    """One input file, as it was when it was read."""

    path: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server of a run, and the hand-over root that it shares with us."""

    url: str
    handover_root: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run was made for. Frozen: a resume with anything else is refused.

    Args:
        run_id: part of every request id.
        created: ISO 8601, UTC.
        version: of hsjournal.
        model: the model folder or name given.
        model_sha256: over the model's config.json.
        tokenizer_sha256: over the tokenizer's files; empty when the prompts came as token ids.
        hidden_size: columns of every state.
        num_layers: decoder layers of the model.
        vocab_size: of the model.
        context_length: longest prompt the server takes whole.
        capture_layers: 0-based; aux i is the output of layer ``capture_layers[i]``.
        dtype: of the states.
        final_norm: ``post`` or ``pre``.
        format: name of the output layout.
        out_dir: absolute.
        engine: ``embedded`` or ``sglang``.
        chunk_size: of the server's chunked prefill, 0 when it never splits a prompt.
        sources: the input files.
        options: what else changed the reading of the prompts.
    """

    run_id: str
    created: str
    version: str
    model: str
    model_sha256: str
    tokenizer_sha256: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    context_length: int
    capture_layers: tuple[int, ...]
    dtype: str
    final_norm: str
    format: str
    out_dir: str
    engine: str
    chunk_size: int
    sources: tuple[Source, ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    @property
    def out_dirs(self) -> tuple[str, ...]:
        """All output folders, absolute; paths in the journal are relative to the first, and absolute in the others."""
        return (self.out_dir, *json.loads(self.options.get(MORE_OUT, "[]")))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers that the run was made with; the address is empty for a server of our own."""
        first = Endpoint(self.options.get("server", ""), self.options["handover_root"])
        return (first, *(Endpoint(url, root) for url, root in json.loads(self.options.get(MORE_SERVERS, "[]"))))

    def to_toml(self) -> str:
        """The manifest as TOML."""
        return tomli_w.dumps(json.loads(json.dumps(asdict(self))))

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            NoJournalError: when there is none.
            SchemaError: when it is not one, or one of a newer hsjournal.
        """
        try:
            raw: dict[str, Any] = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise NoJournalError(
                f"{path.parent} holds no run (no {path.name})",
                remedy="Start one with `hsjournal run RUN_DIR --prompts FILE`.",
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SchemaError(f"{path} can't be read: {error}", remedy="Restore it from a copy.") from None
        known = {f.name for f in fields(cls)}
        if set(raw) != known:
            raise SchemaError(
                f"{path} has other keys than this version knows: {', '.join(sorted(set(raw) ^ known))}",
                remedy="Use the version of hsjournal that made the run.",
            )
        try:
            raw["capture_layers"] = tuple(map(int, raw["capture_layers"]))
            raw["sources"] = tuple(Source(**item) for item in raw["sources"])
        except (TypeError, ValueError) as error:
            raise SchemaError(f"{path} holds values that are none: {error}", remedy="Restore it from a copy.") from None
        return cls(**raw)


CHANGEABLE = (
    "handover_budget", "max_in_flight", "connect_timeout", "read_timeout", "sample_timeout", "pause_limit",
    "retry_pause", "max_strikes", "max_restarts", "sink_threads", "max_out", "stall_timeout", "poll_interval", "stuck_limit",
    "canary_every", "verify",
)  # fmt: skip
"""The settings that the command line takes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What may change between two starts of the same run; handed whole to the worker.

    Times are seconds, sizes bytes. ``server_url`` and ``handover_root`` are of the first server, ``more_servers`` the
    others; requests in flight and bytes handed over are limited for each of them.
    """

    server_url: str
    handover_root: str
    more_servers: tuple[Endpoint, ...] = ()
    max_in_flight: int = 32
    handover_budget: int = 64 << 30
    connect_timeout: float = 10.0
    read_timeout: float = 600.0
    sample_timeout: float = 900.0
    dump_timeout: float = 60.0
    max_strikes: int = 3
    max_restarts: int = 10
    most_failures_in_a_row: int = 10
    pause_limit: float = 3600.0
    retry_pause: float = 3.0
    stall_timeout: float = 300.0
    poll_interval: float = 2.0
    stuck_limit: float = 0.0
    sink_threads: int = 2
    canary_every: int = 500
    max_out: int = 0
    verify: str = "full"
    log_level: str = "INFO"

    def to_json(self) -> str:
        """As one line of JSON, for a child's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of :meth:`to_json`."""
        raw = json.loads(text)
        return cls(**raw | {"more_servers": tuple(Endpoint(**item) for item in raw.get("more_servers", ()))})

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All servers, in the order of the command line."""
        return (Endpoint(self.server_url, self.handover_root), *self.more_servers)
