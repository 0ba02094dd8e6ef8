"""A pickle of tensors and plain values, understood without being executed.

Only the few opcodes that such a pickle needs are known; nothing is imported, called or built but text, numbers,
lists, tuples, tables and two markers: a storage that the pickle refers to, and a call that its reader interprets.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class PickleError(ValueError):
    """Not a pickle of tensors and plain values."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions, ``module.name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that the pickle refers to: its class's name, its key in the zip, and its number of elements."""

    kind: str
    key: str
    count: int


Call = Callable[[str, tuple[Any, ...]], Any]
"""What to make of a call that the pickle asks for: the name and the arguments."""

_MARK = object()
_PUSHED = frozenset(
    ("BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
)
_FRESH: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}


def understand(data: bytes, call: Call) -> Any:
    """The value that a pickle stands for.

    Raises:
        PickleError: when it asks for anything else.
        ValueError, IndexError, KeyError, TypeError: when it is no whole pickle.
    """
    machine = _Machine(call)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.step(opcode.name, argument)
    raise PickleError("the pickle has no end")


class _Machine:
    def __init__(self, call: Call) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._call = call

    def step(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name == "GLOBAL":
            self.stack.append(Global(argument.replace(" ", ".")))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in ("BINPERSID", "REDUCE"):
            self._refer(name)
        elif name not in ("PROTO", "FRAME"):
            self._collect(name)

    def _refer(self, name: str) -> None:
        argument = self.stack.pop()
        if name == "REDUCE":
            function = self.stack.pop()
            if not isinstance(function, Global) or not isinstance(argument, tuple):
                raise PickleError("the pickle calls something that is no function")
            self.stack.append(self._call(function.name, argument))
            return
        tag, kind, key, _, count = argument
        if tag != "storage" or not isinstance(kind, Global) or not isinstance(key, str) or type(count) is not int:
            raise PickleError("the pickle refers to something else than a storage")
        self.stack.append(Storage(kind.name, key, count))

    def _collect(self, name: str) -> None:
        if name in ("TUPLE", "APPENDS", "SETITEMS"):
            items = self._pop_to_mark()
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "SETITEM"):
            count = {"APPEND": 1, "SETITEM": 2}.get(name) or int(name[-1])
            items = self.stack[-count:]
            del self.stack[-count:]
        else:
            raise PickleError(f"the pickle does something else than hold tensors: {name}")
        if name.startswith("TUPLE"):
            self.stack.append(tuple(items))
        elif name.startswith("APPEND"):
            self.stack[-1].extend(items)
        else:
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("the pickle closes what it never opened")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items
