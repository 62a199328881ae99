"""Calls of models: recorded as a loop makes them, so that they can be run again."""
