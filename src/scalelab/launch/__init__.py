"""How ranks are started, watched and ended: the parent's side of every launcher."""
