"""The folder that `scalelab meter` puts into PYTHONPATH."""
