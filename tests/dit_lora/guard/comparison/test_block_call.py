"""A block's call that is made again leaves no trace in the pass around it."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from dit_lora.guard.comparison.block_call import BlockCall


def test_what_collects_layers_outputs_in_a_pass_does_not_see_a_call_that_is_made_again() -> None:
    """Transformers collects hidden states so, and LLaVA takes one of them by its number."""
    collector: ContextVar[list[torch.Tensor] | None] = ContextVar("output_collector", default=None)
    layer = nn.Linear(3, 3)

    def collect(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        collected = collector.get()
        if collected is not None:
            collected.append(output)

    layer.register_forward_hook(collect)
    token = collector.set([])
    try:
        layer(torch.randn(2, 3))
        values = BlockCall("layer", layer, (torch.randn(2, 3),), {}, (True,)).compute_values(uses_fp32=False)
        assert values["layer"].shape == (2, 3)
        layer(torch.randn(2, 3))
        collected = collector.get()
        assert collected is not None
        assert len(collected) == 2
    finally:
        collector.reset(token)
