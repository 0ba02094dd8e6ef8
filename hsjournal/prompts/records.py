"""One JSON object of the user's → one typed record, or a refusal.

Row shapes: ``conversations`` or ``messages`` (turns with role and content, or from and value), ``text`` (already
templated), ``input_ids`` with ``loss_mask``. Beside them ``id``, ``system`` and ``tools`` are read; other columns are
passed over. A column that is null counts as absent, as tables write it.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from dataclasses import dataclass
from typing import Any, Never

from hsjournal.prompts.refusal import Refusal, RowRefusedError, show
from hsjournal.prompts.runs import run_lengths

MAX_ID_CHARACTERS = 4096

_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}

_SHAPES = ("conversations", "messages", "text", "input_ids")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
}
_FOLLOWS = {  # which roles may follow; None is the start
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios", "pixel_values")
_MEDIA_PARTS = re.compile(r"(input_)?(image|audio|video)(_url)?")
COLUMNS = frozenset({"id", *_SHAPES, "loss_mask", "system", "tools", *_MEDIA_KEYS})
"""The columns of a row that mean something here; others are passed over."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in the form that chat templates take.

    Args:
        turns: ``role`` and ``content``; where given ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``name``.
            An assistant's content may be None beside tool calls.
        tools: JSON schemas of the tools, or None.
    """

    turns: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None = None

    @property
    def answers(self) -> int:
        """Turns of the assistant."""
        return sum(turn["role"] == "assistant" for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Text:
    """Text that a template has already been applied to."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and the run lengths of their loss mask."""

    input_ids: array[int]
    loss_mask: tuple[int, ...]


Record = Conversation | Text | Tokens


def parse_id(raw: dict[str, Any]) -> str | None:
    """The row's own id as text, None when it has none. Whole numbers become text.

    Raises:
        RowRefusedError: for anything else, and for text that can't be encoded.
    """
    value = raw.get("id")
    if value is None:
        return None
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise RowRefusedError(Refusal.BAD_ID, f"id is {show(value)}, neither text nor a whole number")
    if len(value) > MAX_ID_CHARACTERS:
        raise RowRefusedError(Refusal.BAD_ID, f"id has {len(value)} characters, more than {MAX_ID_CHARACTERS}")
    check_values(value)
    return value


def parse_record(raw: dict[str, Any]) -> Record:
    """The record that ``raw`` holds.

    Raises:
        RowRefusedError: naming the first value that is missing, of a wrong type or out of place.
    """
    check_values(raw)
    _refuse_media(raw, "the row")
    shapes = [key for key in _SHAPES if raw.get(key) is not None]
    if len(shapes) != 1:
        have = f"both {' and '.join(shapes)}" if shapes else f"none of {', '.join(_SHAPES)}"
        raise RowRefusedError(Refusal.UNKNOWN_SHAPE, f"the row has {have}")
    match shapes[0]:
        case "text":
            text = _text(raw["text"], "text")
            if not text:
                raise RowRefusedError(Refusal.EMPTY, "text is empty")
            return Text(text)
        case "input_ids":
            return _tokens(raw)
        case key:
            return _conversation(raw, key)


def check_values(value: object) -> None:
    r"""Refuse text that has no encoding and numbers that JSON can't hold, wherever they stand.

    ``"\ud800"`` and ``1e999`` are valid JSON that Python reads as half a character and as infinity.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if found := _SURROGATE.search(item):
                raise RowRefusedError(Refusal.BROKEN_UNICODE, f"half of a surrogate pair, \\u{ord(found[0]):04x}")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise RowRefusedError(Refusal.BROKEN_JSON, f"a number is {item}")
        elif isinstance(item, list):
            if set(map(type, item)) != {int}:  # token ids are long, and can hide neither
                stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())


def _conversation(raw: dict[str, Any], key: str) -> Conversation:
    items = _list(raw[key], key)
    turns = [_turn(item, f"{key}[{n}]") for n, item in enumerate(items)]
    system = raw.get("system")
    if system is not None and _text(system, "system"):
        turns.insert(0, {"role": "system", "content": system})
    if not any(turn["role"] != "system" for turn in turns):
        raise RowRefusedError(Refusal.EMPTY, f"{key} has no turns" if not turns else f"{key} has a system prompt only")
    last = None
    for n, turn in enumerate(turns):
        if turn["role"] not in _FOLLOWS[last]:
            place = f"comes after {last!r}" if last else "comes first"
            raise RowRefusedError(Refusal.WRONG_ORDER, f"turn {n + 1} is {turn['role']!r} and {place}")
        last = turn["role"]
    return Conversation(tuple(turns), _objects(raw.get("tools"), "tools"))


def _turn(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        _wrong(where, item, "an object")
    _refuse_media(item, where)
    if (item.get("role") is None) == (item.get("from") is None):
        raise RowRefusedError(Refusal.WRONG_TYPE, f"{where} needs either role and content, or from and value")
    role_key, content_key = ("role", "content") if item.get("role") is not None else ("from", "value")
    name = _text(item[role_key], f"{where}.{role_key}")
    if (role := _ROLES.get(name)) is None:
        raise RowRefusedError(Refusal.UNKNOWN_ROLE, f"{where}.{role_key} is {show(name)}, none of {', '.join(_ROLES)}")
    turn: dict[str, Any] = {"role": role}
    calls = _objects(item.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        if role != "assistant":
            raise RowRefusedError(Refusal.WRONG_TYPE, f"{where} has tool_calls but is {role!r}")
        turn["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    for extra in ("reasoning_content", "tool_call_id", "name"):
        if item.get(extra) is not None and (role == "assistant" or extra != "reasoning_content"):
            turn[extra] = _text(item[extra], f"{where}.{extra}")
    content = item.get(content_key)
    turn["content"] = None if content is None and calls else _content(content, f"{where}.{content_key}")
    silent = not (turn["content"] or "").strip() and not calls and not turn.get("reasoning_content")
    if silent and role in ("user", "assistant"):
        raise RowRefusedError(Refusal.EMPTY_TURN, f"{where} ({role}) has no words")
    return turn


def _content(value: object, where: str) -> str:
    """Text, or parts of text put end to end, as templates that take parts do."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _wrong(where, value, "text")
    words = []
    for n, part in enumerate(value):
        if isinstance(part, str):
            words.append(part)
            continue
        if not isinstance(part, dict):
            _wrong(f"{where}[{n}]", part, "a part of text")
        kind = part.get("type")
        _refuse_media(part, f"{where}[{n}]")
        if isinstance(kind, str) and _MEDIA_PARTS.fullmatch(kind):
            raise RowRefusedError(Refusal.MULTIMODAL, f"{where}[{n}] is {kind}; only text is extracted")
        if kind != "text":
            raise RowRefusedError(Refusal.WRONG_TYPE, f"{where}[{n}] is a part of type {show(kind)}")
        words.append(_text(part.get("text"), f"{where}[{n}].text"))
    return "".join(words)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """The call with its arguments as an object: servers parse them so before a template sees them."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        _wrong(f"{where}.function", function, "an object")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    check_values(parsed)
    filled = function | {"arguments": parsed}
    return call | {"function": filled} if "function" in call else filled


def _objects(value: object, where: str) -> list[dict[str, Any]] | None:
    """A list of objects, given as such or as its JSON text; None when there are none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowRefusedError(
                Refusal.WRONG_TYPE, f"{where} is text but not the JSON of a list: {show(value)}"
            ) from None
        check_values(value)
    if value is None or value == "":
        return None
    for n, item in enumerate(_list(value, where)):
        if not isinstance(item, dict):
            _wrong(f"{where}[{n}]", item, "an object")
    return _list(value, where) or None


def _tokens(raw: dict[str, Any]) -> Tokens:
    ids = _whole_numbers(raw["input_ids"], "input_ids")
    if raw.get("loss_mask") is None:
        raise RowRefusedError(Refusal.WRONG_TYPE, "input_ids without loss_mask")
    mask = _whole_numbers(raw["loss_mask"], "loss_mask")
    if not ids:
        raise RowRefusedError(Refusal.EMPTY, "input_ids is empty")
    if len(mask) != len(ids):
        raise RowRefusedError(Refusal.LENGTH_MISMATCH, f"{len(ids)} input_ids but {len(mask)} values of loss_mask")
    if low := next((i for i in ids if not 0 <= i < 1 << 32), None):
        raise RowRefusedError(Refusal.BAD_TOKEN_ID, f"input_ids has {show(low)}")
    if bad := next((i for i in mask if i not in (0, 1)), None):
        raise RowRefusedError(Refusal.BAD_MASK, f"loss_mask has {show(bad)}, neither 0 nor 1")
    return Tokens(array("I", ids), run_lengths(mask))


def _whole_numbers(value: object, where: str) -> list[int]:
    items = _list(value, where)
    if set(map(type, items)) - {int}:
        n, bad = next((n, item) for n, item in enumerate(items) if type(item) is not int)
        _wrong(f"{where}[{n}]", bad, "a whole number")
    return items


def _refuse_media(table: dict[str, Any], where: str) -> None:
    for key in _MEDIA_KEYS:
        if table.get(key):
            raise RowRefusedError(Refusal.MULTIMODAL, f"{where} has {key}; only text is extracted")


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        _wrong(where, value, "a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        _wrong(where, value, "text")
    return value


def _wrong(where: str, value: object, wanted: str) -> Never:
    given = "null" if value is None else _TYPE_NAMES.get(type(value), type(value).__name__)
    raise RowRefusedError(Refusal.WRONG_TYPE, f"{where} is {given}, not {wanted}")
