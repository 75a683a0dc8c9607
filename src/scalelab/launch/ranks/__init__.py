"""Who a rank is, where it runs, and which cores it may use."""
