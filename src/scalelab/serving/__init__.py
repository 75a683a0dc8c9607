"""A local page over the runs directory: browse, search, compare, watch. It reads and never writes."""
