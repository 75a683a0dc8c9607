"""Pure functions from samples to numbers: no plot, no print, no file, no torch."""
