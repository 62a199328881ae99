"""Converts rotations stored as complex numbers, one for each pair of a head, to the tables that the kernels take.

Shapes: S tokens, D head width.
"""

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dit_lora.fuse.attention import RotaryTables

_TABLE_CACHE = WeakIdKeyDictionary()
"""Tables cached by the rotations they were made from: a model passes one tensor to all of its blocks."""


def get_rotary_tables(rotations: torch.Tensor) -> RotaryTables:
    """Cosines and sines (..., S, D) of complex rotations (..., S, D / 2), each repeated for both elements of a pair.

    Cached as long as the input tensor lives, which must not change in place.
    """
    # Compiled: one graph has one block, and the partitioner chooses what the graph saves.
    if torch.compiler.is_compiling():
        return _compute_tables(rotations)
    tables: RotaryTables | None = _TABLE_CACHE.get(rotations)
    if tables is None:
        tables = _TABLE_CACHE[rotations] = _compute_tables(rotations)
    return tables


def _compute_tables(rotations: torch.Tensor) -> RotaryTables:
    # (..., S, D / 2) complex to two real tables of the same shape, then each angle twice.
    cos, sin = torch.view_as_real(rotations).unbind(-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
