"""What ``hsjournal report`` tells of a run: read from its journal and manifest, nothing is changed."""
