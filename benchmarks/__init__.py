"""Benchmarks: `python -m benchmarks.step`, `.overhead`, `.guard`, `.snapshot`, `.cache_memory`. Never run as tests."""
