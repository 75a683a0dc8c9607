"""Trace files as events: PyTorch's and Nsight's, whole or in pieces, and the dumps of the flight recorder."""
