"""Published data sets, fetched to where workloads look for them."""
