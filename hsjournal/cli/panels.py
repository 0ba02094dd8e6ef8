"""``--help`` in groups: the commands by what one wants to do, the many options of ``run`` and ``resume`` by what they are about."""

from __future__ import annotations

from typing import Any

COMMANDS = {
    "Extract": ("run", "resume", "prompts", "fleet"),
    "Watch": ("status", "diagnose", "events", "metrics", "report"),
    "Check and mend": ("doctor", "verify", "retry", "reconcile", "adopt"),
    "Use the output": ("index", "export", "release"),
    "Servers and settings": ("serve", "serve-args", "config"),
}
OPTIONS = {
    "What to extract": ("prompts", "model", "layers", "dtype", "format", "out", "capture-prenorm", "shard", "adopt-from"),
    "How prompts are read": (
        "max-tokens", "truncate", "last-turn-only", "min-loss-tokens", "limit", "shuffle-seed", "chat-template",
        "trust-remote-code", "tokenize-processes",
    ),
    "Server": (
        "server", "launch", "start-timeout", "api-key-file", "protocol", "port", "connect-timeout", "read-timeout",
        "canary-every",
    ),
    "Hand-over and output": (
        "handover-root", "handover-budget", "max-in-flight", "sink-threads", "verify", "max-out", "allow-little-room",
    ),
    "Stalls and failures": (
        "stall-timeout", "poll-interval", "stuck-limit", "sample-timeout", "pause-limit", "retry-pause", "max-strikes",
        "max-restarts",
    ),
    "Telling": ("notify-command", "notify-url", "metrics-port", "metrics-file", "plain", "quiet", "verbose"),
    "This call": ("dry-run", "help"),
}  # fmt: skip


def arrange(group: Any) -> None:
    """Put every command, and every option of ``run`` and ``resume``, in its panel."""
    for panel, names in COMMANDS.items():
        for name in names:
            if name in group.commands:
                group.commands[name].rich_help_panel = panel
    panels = {key: panel for panel, keys in OPTIONS.items() for key in keys}
    for name in ("run", "resume"):
        for parameter in group.commands[name].params:
            key = parameter.opts[0].removeprefix("--")
            if parameter.param_type_name == "option" and key in panels:
                parameter.rich_help_panel = panels[key]
