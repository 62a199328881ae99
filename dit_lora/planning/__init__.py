"""Memory and time of a run, counted before anything is downloaded."""
