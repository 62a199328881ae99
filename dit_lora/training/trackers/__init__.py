"""Experiment trackers, in addition to the run's own files."""
