"""The command line: thin typer commands, no logic."""
