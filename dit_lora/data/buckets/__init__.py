"""Buckets: the shapes by which samples are grouped."""
