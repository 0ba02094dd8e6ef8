"""For whoever trains on a run: its verified files as a torch Dataset. The only room beside capture that imports torch."""

from __future__ import annotations

from hsjournal.data.hidden_states import HiddenStates, ReleasedError, pad

__all__ = ["HiddenStates", "ReleasedError", "pad"]
