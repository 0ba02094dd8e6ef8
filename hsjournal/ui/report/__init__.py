"""A run's report as one self-contained page: no script, no picture, nothing loaded."""
