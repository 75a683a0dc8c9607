"""The built-in models, and the loading of those of the user."""
