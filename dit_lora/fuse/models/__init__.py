"""Patches of each model, a file each."""
