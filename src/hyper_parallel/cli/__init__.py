"""Command line: thin typer commands over the rooms; nothing heavy is imported before it is needed."""
