"""The Meter in a script of the user's own."""
