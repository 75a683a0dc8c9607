"""What rank processes run. With `quantize`, the only code that imports torch; entered by starting a process."""
