"""The journal's statements as SQL text with named parameters, each made once.

Plain text rather than SQLAlchemy Core: importing Core costs every worker and every gate a quarter of a second at its
start, and running a statement through it three times what SQLite needs. Partial indexes serve only queries that repeat
their predicate verbatim, so states stand as literals here; tests hold every statement to its plan with EXPLAIN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from hsjournal.states import DEFERRED, INCOMPLETE, State, Transition, is_allowed

SAMPLE_COLUMNS = (
    "row", "sample_id", "source", "line", "num_tokens", "loss_tokens", "state", "actor", "reason", "attempt", "strikes",
    "suspect", "epoch", "changed_at", "sent_at", "server", "boot_id", "source_xxh3", "output_path", "output_bytes",
    "output_xxh3", "verify_method", "verified_at", "mask_method", "cut_from",
    "released_at",
)  # fmt: skip
_NEW = (
    "row", "sample_id", "source", "line", "num_tokens", "loss_tokens", "state", "actor", "reason", "changed_at",
    "mask_method", "cut_from",
)  # fmt: skip
_ZERO = ("attempt", "strikes", "suspect", "epoch", "output_bytes")
_WITH_FILE = (State.WRITTEN, State.VERIFIED)
_OF_A_FILE = ("source_xxh3", "output_path", "output_xxh3", "verify_method", "verified_at", "released_at")

_IS_EPOCH = "(SELECT epoch FROM run) = :at_epoch"


def _insert(table: str, bound: Iterable[str], zero: Iterable[str] = (), how: str = "") -> str:
    names, zeros = tuple(bound), tuple(zero)
    values = ", ".join([f":{name}" for name in names] + ["0"] * len(zeros))
    return f"INSERT {how}INTO {table} ({', '.join((*names, *zeros))}) VALUES ({values})"


ADD_SAMPLES = _insert("sample", _NEW, _ZERO)
ADD_PROMPTS = _insert("prompt", ("row", "input_ids", "loss_mask"))
ADD_EVENT = _insert("event", ("id", "key", "at", "epoch", "kind", "row", "detail"), how="OR IGNORE ")

COUNTS = "SELECT state, rows, tokens, bytes FROM state_count"
RECOUNT = "SELECT state, count(*) FROM sample GROUP BY state"
INTAKE = "SELECT intake FROM run WHERE id = 1"
EPOCH = "SELECT epoch FROM run WHERE id = 1"
RAISE_EPOCH = "UPDATE run SET epoch = epoch + 1 WHERE id = 1 RETURNING epoch"

_CLAIM = (
    "SELECT s.row, s.sample_id, s.num_tokens, s.attempt, s.strikes, p.input_ids, p.loss_mask "
    "FROM sample AS s JOIN prompt AS p ON p.row = s.row WHERE {where} ORDER BY s.row LIMIT :most"
)
NEXT_PENDING = _CLAIM.format(where="s.state = 'pending' AND s.row > :after")
NEXT_SUSPECT = _CLAIM.format(where="s.suspect = 1 AND s.state = 'pending' AND s.row > :after")
ONE_ROW = _CLAIM.format(where="s.row = :after")
_INCOMPLETE = ", ".join(f"'{state}'" for state in INCOMPLETE)
SUSPECTS = f"SELECT * FROM sample WHERE suspect = 1 AND state IN ({_INCOMPLETE}) ORDER BY row"
NEXT_ROWS = "SELECT * FROM sample WHERE row > :after ORDER BY row LIMIT :most"
NEXT_PROMPTS = "SELECT row, input_ids FROM prompt WHERE row > :after ORDER BY row LIMIT :most"
NEXT_MASKED_PROMPTS = (
    "SELECT s.row, s.sample_id, s.state, p.input_ids, p.loss_mask FROM sample AS s LEFT JOIN prompt AS p ON p.row = s.row "
    "WHERE s.row > :after ORDER BY s.row LIMIT :most"
)
NEXT_MASKS = "SELECT row, loss_mask FROM prompt WHERE row > :after ORDER BY row LIMIT :most"
PROMPTS_OF_LENGTH = (
    "SELECT s.row, s.sample_id, s.state, p.input_ids, p.loss_mask FROM sample AS s JOIN prompt AS p ON p.row = s.row "
    "WHERE s.num_tokens = :tokens AND s.row <> :row ORDER BY abs(s.row - :row) LIMIT :most"
)
ROW_BY_NUMBER = "SELECT * FROM sample WHERE row = :row"
ROW_BY_ID = "SELECT * FROM sample WHERE sample_id = :sample_id AND state <> 'skipped'"
RELEASE = (
    "UPDATE sample SET released_at = :now WHERE row = :row AND state = 'verified' AND released_at IS NULL RETURNING row"
)
RELEASED = "SELECT count(*), coalesce(sum(output_bytes), 0) FROM sample WHERE released_at IS NOT NULL"
DEFERRED_TOTALS = (
    "SELECT count(*), coalesce(sum(num_tokens), 0), coalesce(sum(output_bytes), 0) FROM sample "
    f"WHERE state = 'written' AND verify_method = '{DEFERRED}'"
)
UNDER_WAY = f"SELECT * FROM sample WHERE state = 'written' AND coalesce(verify_method, '') <> '{DEFERRED}' ORDER BY row"
EVENTS = "SELECT id, at, epoch, kind, row, detail FROM event WHERE id > :after ORDER BY id LIMIT :most"


@cache
def rows_in(state: State) -> str:
    """All columns of the rows in ``state``, ascending, after ``:after``."""
    return f"SELECT * FROM sample WHERE state = '{state}' AND row > :after ORDER BY row LIMIT :most"


@cache
def change(transition: Transition, extra: tuple[str, ...]) -> str:
    """Compare-and-set of one row on number, state, attempt and the run's epoch, read inside the statement.

    A row that leaves ``written`` or ``verified`` backwards forgets its file.

    Args:
        transition: source, target and actor, which must stand in the table.
        extra: names of further columns that are set from parameters of the same name.
    """
    source, target, actor = transition.source, transition.target, transition.actor
    if not is_allowed(source, target, actor):
        raise ValueError(f"not in TRANSITIONS: {transition}")
    sets: dict[str, str] = {}
    if source in _WITH_FILE and target not in _WITH_FILE:
        sets |= dict.fromkeys(_OF_A_FILE, "NULL")
        sets["output_bytes"] = "0"
    sets |= _bound(extra)
    sets |= {"state": f"'{target}'", "actor": f"'{actor}'", "epoch": ":at_epoch", "changed_at": ":changed_at"}
    return f"{_one_row(source, sets)} AND attempt = :at_attempt"


@cache
def touch(state: State, extra: tuple[str, ...]) -> str:
    """Compare-and-set that leaves the state alone (strikes, suspects)."""
    return _one_row(state, _bound(extra) | {"changed_at": ":changed_at"})


@cache
def take(state: State) -> str:
    """Compare-and-set of the epoch alone: the worker of this epoch works on the row from here on."""
    return _one_row(state, {"epoch": ":at_epoch"})


def _bound(names: Iterable[str]) -> dict[str, str]:
    unknown = set(names) - set(SAMPLE_COLUMNS)
    if unknown:
        raise ValueError(f"no columns of a sample: {sorted(unknown)}")
    return {name: f":{name}" for name in names}


def _one_row(state: State, sets: Mapping[str, str]) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in sets.items())
    return f"UPDATE sample SET {values} WHERE row = :at_row AND state = '{state}' AND {_IS_EPOCH}"
