"""From a dump in the hand-over root to a verified file in the trainer's format, without torch."""
