"""Training loops composed of parts by a seed: `python -m benchmarks.loops compose --seed S --count N`."""
