"""Benchmarks: `python -m benchmarks.step`, `.overhead`, `.activations`, `.guard`, `.snapshot`, `.cache_memory`. Never run as tests."""
