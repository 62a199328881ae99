"""Implementations of the commands that do not train."""
