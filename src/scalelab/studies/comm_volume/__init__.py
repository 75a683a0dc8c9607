"""Communication volume."""
