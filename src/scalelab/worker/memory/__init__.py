"""Memory of a rank: recorded, limited and forecast."""
