"""Turns collections of garbage off where it is imported: first in the fork server, whose imports they make slower.

The processes that are forked turn them on again, with this threshold.
"""

import gc

gc.disable()
gc.set_threshold(100_000)  # as in conftest.py
