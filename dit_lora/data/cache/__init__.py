"""Cache of encoded clips and captions on disk."""
