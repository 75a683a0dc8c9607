"""Model size."""
