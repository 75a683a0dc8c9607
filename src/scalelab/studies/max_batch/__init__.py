"""Max batch."""
