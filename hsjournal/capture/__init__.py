"""What runs inside a server's process: standard library and torch only (and transformers in ``embedded``)."""
