"""Trackers beside the run's own files."""
