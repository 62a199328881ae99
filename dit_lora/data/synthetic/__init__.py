"""Clips and conversations made up for demos and tests."""
