"""Callbacks that attach the guard to the trainers of other libraries."""
