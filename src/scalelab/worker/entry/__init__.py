"""How a rank process begins."""
