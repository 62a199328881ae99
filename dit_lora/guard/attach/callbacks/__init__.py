"""Callbacks that put the guard into trainers of other libraries."""
