"""Memory of a run, counted before anything is downloaded."""
