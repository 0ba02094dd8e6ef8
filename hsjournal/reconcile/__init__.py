"""Make the journal and the hand-over root agree, after whatever happened: gather, plan, apply."""
