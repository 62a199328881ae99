"""Benchmarks: `python -m benchmarks.step`, `.overhead`, `.activations`, `.guard`, `.snapshot`, `.decode`, `.audit`, `.cache`, `.cache_memory`, `.start`, `.verdicts`. Never run as tests."""
