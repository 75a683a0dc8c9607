"""How ranks come to life, seen from the parent: no torch here."""
