"""Memory and time of a run, computed before anything is downloaded."""
