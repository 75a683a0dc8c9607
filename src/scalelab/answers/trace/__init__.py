"""Documents of `scalelab trace`."""
