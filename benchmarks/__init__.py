"""Benchmarks: `python -m benchmarks.step`, `python -m benchmarks.cache_memory`. Never run as tests."""
