"""What is trained: built in, or the user's own `file.py:build`."""
