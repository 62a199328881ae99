"""Faults of chat models: data, steps and loops."""
