"""Programs that are started as processes: ranks under every launcher, and what the doctor asks for."""
