"""The SQLite journal: one row per sample, changed by compare-and-set only."""
