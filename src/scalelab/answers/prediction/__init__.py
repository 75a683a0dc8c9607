"""Documents of `scalelab predict`."""
