"""``hsjournal doctor``: will this machine carry the run? Each answer is a line: ok, warn or fail, with its remedy."""
