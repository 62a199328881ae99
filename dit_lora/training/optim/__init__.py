"""Optimizers: construction, state and learning rate schedules."""
