"""Rotations that a model has as complex numbers, one for each pair of a head, as the tables that kernels take.

Shapes: S tokens, D head width.
"""

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dit_lora.fuse.attention import Rotary

_TABLES = WeakIdKeyDictionary()
"""Tables by the rotations that they were made of: a model hands one tensor to all of its blocks."""


def tables_of(rotations: torch.Tensor) -> Rotary:
    """Return cosines and sines (..., S, D) of complex rotations (..., S, D / 2), each twice: once for either of a pair.

    Made once for a tensor, and kept as long as it is. Rotations are not changed in place.
    """
    # Compiled, one graph has one block, and what a graph keeps is the partitioner's choice.
    if torch.compiler.is_compiling():
        return _tables(rotations)
    tables: Rotary | None = _TABLES.get(rotations)
    if tables is None:
        tables = _TABLES[rotations] = _tables(rotations)
    return tables


def _tables(rotations: torch.Tensor) -> Rotary:
    cos, sin = torch.view_as_real(rotations).unbind(-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
