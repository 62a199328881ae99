"""Shapes that samples are grouped by."""
