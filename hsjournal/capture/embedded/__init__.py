"""The embedded engine: a transformers model behind SGLang's native endpoints, capturing hidden states.

Run as ``python -m hsjournal.capture.embedded``; see ``--help``.
"""
