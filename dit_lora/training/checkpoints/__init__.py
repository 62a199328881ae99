"""Checkpoints: written completely or not at all, verified by digests, and resumed bit for bit."""
