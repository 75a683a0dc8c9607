"""Large batch."""
