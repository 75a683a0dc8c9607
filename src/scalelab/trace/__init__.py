"""From the trace of a profiler to where the time went. No torch, no GPU: plain files in, numbers out."""
