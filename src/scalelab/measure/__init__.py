"""Running trials: the parent's side (scheduler, launchers) and the rank's side (forkserver, worker, loop)."""
