"""Encoded clips and captions on disk."""
