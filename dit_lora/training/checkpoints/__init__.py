"""Checkpoints: written whole, checked, and resumed bit for bit."""
