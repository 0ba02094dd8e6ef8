"""What lies beside the files: the index, and what a trainer wants to find next to them. Written from the journal alone."""
