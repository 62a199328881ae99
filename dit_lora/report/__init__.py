"""Tells what a run did in one HTML file that needs nothing beside it."""
