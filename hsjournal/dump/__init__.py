"""What lies in the hand-over root: the protocol both sides share, and the client's side of it."""
