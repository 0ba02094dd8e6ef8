"""Where a setting comes from: flag, else ``HSJOURNAL_*``, else ``hsjournal.toml``, else the last start's, else its default.

The file's keys are the options' long names (``max-in-flight = 64``); a table named after a command
(``[resume]``) holds for that command only, before the rest. Flags that say what one call shall do, such as ``--repair``,
are no settings.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from hsjournal.errors import UsageError

FILE, FILE_VARIABLE, PREFIX = "hsjournal.toml", "HSJOURNAL_CONFIG", "HSJOURNAL_"
NO_SETTINGS = frozenset(
    {"help", "version", "json", "dry-run", "repair", "all", "doubted", "reason", "seed", "subset", "outputs", "ids", "parent-fd", "show-completion",
     "install-completion"}
)  # fmt: skip
OTHER_VARIABLES = frozenset(
    {"API_KEY", "BOOT_ID", "CACHE", "CAPTURE_LAYERS", "CAPTURE_PRENORM", "CONFIG", "FAULTS", "GROUP_MODE", "HANDOVER_ROOT", "NODE_DIR", "PAYLOAD", "RID_LOG", "SHM", "TORCH"}
)  # fmt: skip
"""Environment variables of hsjournal, its plugin and its scripts that are no option of a command."""
TOLD_VARIABLES = frozenset(
    {"AFTER_S", "AT", "EVENT", "EXIT_CODE", "HOST", "ROW", "RUN_DIR", "SENTENCE", "SILENT_S", "VERDICT", "WAY_OUT"}
)  # fmt: skip
"""Those that a command of ``--notify-command`` gets beside ``PAYLOAD``; it may well call hsjournal."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of one command that may be set elsewhere too; parameter and context are the command line library's own."""

    command: str
    key: str
    parameter: Any
    context: Any

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.replace("-", "_").upper()


def options_of(group: Any, prefix: str = "") -> Iterator[Option]:
    """Every option that is a setting, of every command below ``group``."""
    for name, command in group.commands.items():
        path = f"{prefix}{name}"
        if hasattr(command, "commands"):
            yield from options_of(command, f"{path} ")
            continue
        context = command.make_context(name, [], resilient_parsing=True)
        for parameter in command.params:
            keys = [text[2:] for text in parameter.opts if text.startswith("--")]
            if keys and parameter.param_type_name == "option" and keys[0] not in NO_SETTINGS:
                yield Option(path, keys[0], parameter, context)


def settings_file() -> Path | None:
    """The file that holds here: named by ``HSJOURNAL_CONFIG``, else ``hsjournal.toml`` in the current folder, if it is there.

    Raises:
        UsageError: when the one that is named is not there.
    """
    named = os.environ.get(FILE_VARIABLE)
    path = Path(named or FILE)
    if path.is_file():
        return path
    if named:
        raise UsageError(f"{FILE_VARIABLE} names {named}, which is no file", remedy="Correct it, or unset it.")
    return None


def read_file(path: Path, options: Iterable[Option]) -> dict[str, dict[str, Any]]:
    """The settings of ``path`` by command and parameter name.

    Raises:
        UsageError: naming file and key, when a key is unknown or a value is none.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}", remedy="Correct it (TOML: key = value).") from None
    known = list(options)
    commands = {option.command for option in known}
    tables = {key: value for key, value in raw.items() if isinstance(value, dict)}
    for key in tables:
        if key not in commands:
            raise _unknown(path, f"table [{key}]", key, commands)
    everywhere = {key: value for key, value in raw.items() if key not in tables}
    _refuse_unknown(path, everywhere, {option.key for option in known}, "")
    found: dict[str, dict[str, Any]] = {command: {} for command in commands}
    for command in commands:
        own = tables.get(command, {})
        _refuse_unknown(path, own, {option.key for option in known if option.command == command}, f" in [{command}]")
        merged = everywhere | own
        for option in known:
            if option.command == command and option.key in merged:
                found[command][option.parameter.name] = checked(path, option, merged[option.key])
    return found


def _refuse_unknown(path: Path, table: Mapping[str, Any], keys: set[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise _unknown(path, f"key {key!r}{where}", key, keys)


def _unknown(path: Path, what: str, key: str, known: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(key.replace("_", "-"), sorted(known), n=1, cutoff=0.5)
    return UsageError(
        f"{path} has an unknown {what}",
        remedy=f"Did you mean {near[0]!r}?" if near else "`hsjournal config show` lists the settings.",
    )


def checked(path: Path, option: Option, value: Any) -> Any:
    """A value of a file as the option takes it on the command line.

    Raises:
        UsageError: naming file and key, when it is none.
    """
    many = option.parameter.multiple
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not many:
        raise UsageError(f"{path}: {option.key} takes one value, not a list", remedy="Write it without [ ].")
    for each in values:
        if not isinstance(each, str | int | float | bool) or isinstance(each, bool) != bool(option.parameter.is_flag):
            kind = "true or false" if option.parameter.is_flag else "a string or a number"
            raise UsageError(f"{path}: {option.key} = {each!r} is not {kind}", remedy="Correct the file.")
    plain = [each if isinstance(each, bool) else str(each) for each in values]
    try:
        option.parameter.process_value(option.context, plain if many else plain[0])
    except typer.BadParameter as error:
        raise UsageError(f"{path}: {option.key} = {value!r}: {error.message}", remedy="Correct the file.") from None
    return plain if many else plain[0]


def bind(group: Any) -> tuple[dict[str, Any], Path | None]:
    """Give every setting its environment variable; the defaults that the file changes, as the library wants them.

    Raises:
        UsageError: as :func:`settings_file` and :func:`read_file`.
    """
    options = list(options_of(group))
    for option in options:
        option.parameter.envvar = option.variable
        option.parameter.show_envvar = option.variable in os.environ  # in a refusal, not all over --help
    path = settings_file()
    if path is None:
        return {}, None
    nested: dict[str, Any] = {}
    for command, values in read_file(path, options).items():
        place = nested
        for word in command.split(" "):
            place = place.setdefault(word, {})
        place.update(values)
    return nested, path


def unknown_variables(group: Any, environment: Mapping[str, str]) -> list[str]:
    """``HSJOURNAL_*`` variables that nothing reads, each with the one that may have been meant.

    They are told of and not refused: an environment belongs to more than one program, and to more than one version of ours.
    """
    known = {option.variable for option in options_of(group)} | {
        PREFIX + name for name in OTHER_VARIABLES | TOLD_VARIABLES
    }
    lines = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            lines.append(f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else ""))
    return lines
