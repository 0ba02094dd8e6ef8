"""Resumable extraction of a language model's hidden states, journalled in SQLite.

This package imports nothing at its top: parts of it run inside other programs' processes (a stock SGLang
server loads :mod:`hsjournal.capture`), and ``hsjournal status`` must answer at once.
"""

__version__ = "0.1.0"
