"""`scalelab data`: make the data that workloads train on."""
