"""What an operator does to a run besides running it: check, repair, retry, reconcile, adopt."""
