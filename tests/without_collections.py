"""Turns collections of garbage off where it is imported: first in the fork server, whose imports they make slower.

The processes that are forked turn them on again.
"""

import gc

gc.disable()
