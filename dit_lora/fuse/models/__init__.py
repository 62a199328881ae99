"""Patches for each model, one file per model."""
