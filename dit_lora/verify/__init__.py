"""Checks of a result in a fresh stock model."""
