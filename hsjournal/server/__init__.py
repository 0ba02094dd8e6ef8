"""How the client's side talks to a server: HTTP, preflight, and launching one."""
