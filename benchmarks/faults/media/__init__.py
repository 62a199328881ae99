"""Broken media, captions, archives and cache entries."""
