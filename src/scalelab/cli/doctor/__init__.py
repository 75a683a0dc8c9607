"""`scalelab doctor`: what this machine can measure."""
