"""Optimizers built from their records, their state and learning rates."""
