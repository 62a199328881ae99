"""Benchmarks, such as `python -m benchmarks.step`; benchmarks/README.md lists them. Never run as tests."""
