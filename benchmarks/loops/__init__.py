"""A corpus of training loops, a driver that runs them with and without the guard, and a composer of further loops.

`python -m benchmarks.loops run` checks every loop, healthy and with each fault that it declares.
`python -m benchmarks.loops compose` draws more loops and checks those.
"""
