"""A SwiGLU of three linear layers, down(silu(gate(x)) * up(x)), that saves only its two projections for backward."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from dit_lora.fuse.attention import RecomputableTensor
from dit_lora.fuse.lora import project_linear_layers


def apply_swiglu(gate: nn.Module, up: nn.Module, down: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x)) for x (B, S, D)."""
    gated, linear = project_linear_layers((gate, up), x)
    activated = RecomputableTensor(functional.silu(gated), partial(functional.silu, gated))
    with activated.skip_saving_activation():
        inner = activated.tensor * linear
    # Recomputed in backward, so that an adapter of the last layer need not save its input.
    hidden = RecomputableTensor(inner, partial(recompute_gated_hidden, gated, linear))
    with hidden.skip_saving_activation():
        return down(hidden.tensor)


def recompute_gated_hidden(gated: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """Recompute the hidden values of a SwiGLU from its two projections, bit for bit."""
    return functional.silu(gated) * linear
