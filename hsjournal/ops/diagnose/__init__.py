"""What the person at the incident did by hand, in at most two seconds and without touching anything that may be stuck."""
