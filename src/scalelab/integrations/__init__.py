"""The Meter inside libraries that own the loop: three lines, and every launch is a run. One file per library."""
