"""What a trial records besides time."""
