"""Next-token loss of the answer tokens, computed with a Transformers model's own forward pass.

Shapes: B batch, L tokens, A answer tokens (padded), D width.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.numerics.objectives import compute_next_token_losses

CHUNK_ROWS = 512
"""Rows of logits computed at a time: 0.1 GiB of fp32 with a vocabulary of 32,000 tokens, 0.3 GiB with 150,000."""
_PATCHED_FLAG = "_answer_losses"


def add_answer_losses(model: nn.Module) -> nn.Module:
    """Patch a causal language model so that its forward can return the mean loss of each sample's answer, fp32 (B,).

    The new forward takes `answer_positions` and `answer_labels`, both int64 (B, A). The first says which hidden state
    predicts each answer token; the second holds the token, or -100 for padding. The result equals the stock loss of
    each sample on its own, but logits of other positions are not computed. All other arguments must be passed by name
    and go to the model's trunk. Without answers, also in `generate`, the stock forward runs.

    Args:
        model: A Transformers causal language model, not yet wrapped by hooks, offload or `Accelerator.prepare`.

    Returns:
        The same model, patched in place. Patching twice has no effect.

    Raises:
        DitLoraError: The forward is already wrapped, or the logits are not a plain linear layer of the trunk's output
            (soft-capped or scaled logits, for example).
    """
    if _PATCHED_FLAG in model.__dict__:
        return model
    if "forward" in model.__dict__:
        raise DitLoraError(
            f"{type(model).__name__}: its forward is wrapped already; call add_answer_losses before "
            "hooks, offload and Accelerate's prepare"
        )
    # Both checks run before anything is patched: a model that cannot be supported stays as it is.
    _split_trunk_and_head(model)
    _require_linear_logits(model)
    model.__dict__[_PATCHED_FLAG] = True
    # Use a bound method: a deep copy of the model binds its own, and Accelerate wraps the underlying function.
    model.__dict__["forward"] = MethodType(_make_forward(type(model).forward), model)
    return model


def _make_forward(original_forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original_forward)  # `generate` reads its signature
    def forward(
        model: Any,
        *args: Any,
        answer_positions: torch.Tensor | None = None,
        answer_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if answer_positions is None and answer_labels is None:
            return original_forward(model, *args, **kwargs)
        if args or answer_positions is None or answer_labels is None:
            raise DitLoraError("answer losses need answer_positions, answer_labels and all other inputs by name")
        trunk, head = _split_trunk_and_head(model)
        # Run only the trunk: logits are computed below, for the answer positions only.
        hidden = trunk(**kwargs, use_cache=False)[0]
        samples = torch.arange(len(hidden), device=hidden.device)[:, None]
        # (B, L, D) -> (B, A, D)
        answers = hidden[samples, answer_positions]
        return compute_next_token_losses(answers, answer_labels, head, chunk_size=CHUNK_ROWS)

    return forward


def _split_trunk_and_head(model: Any) -> tuple[nn.Module, nn.Module]:
    """Split a model into the trunk, which computes hidden states (B, L, D), and the output layer (logits)."""
    trunk = getattr(model, "base_model", None)
    head = model.get_output_embeddings() if isinstance(trunk, nn.Module) else None
    if trunk is model or not isinstance(trunk, nn.Module) or not isinstance(head, nn.Module):
        raise DitLoraError(
            f"{type(model).__name__} is not a trunk with an output layer on top, as Transformers' causal "
            "language models are: its answers' losses cannot be taken"
        )
    return trunk, head


class _HiddenStates:
    """Stand-in for a trunk's output that has only the last hidden states."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


@torch.no_grad()
def _require_linear_logits(model: Any) -> None:
    """Raise unless the stock forward's logits equal the output layer applied to the hidden states, bit for bit."""
    trunk, head = _split_trunk_and_head(model)
    # PEFT wraps an adapted output layer and keeps the original in `base_layer`.
    base = getattr(head, "base_layer", head)
    if not isinstance(base, nn.Linear):
        raise DitLoraError(f"{type(model).__name__}: its output layer is a {type(base).__name__}")
    if base.weight.is_meta:
        return
    weight = base.weight
    states = torch.randn(1, 3, base.in_features, generator=torch.Generator().manual_seed(0))
    states = states.to(weight.device, weight.dtype)
    # Make logits large enough for a soft cap to show: a cap of 30 changes logits of 1 by less than bf16 resolves.
    states = states * (100 / head(states).abs().amax())
    previous_forward = trunk.__dict__.get("forward")
    # Let the trunk return these states, whatever the input, to see what the model does with them.
    trunk.__dict__["forward"] = lambda *args, **kwargs: _HiddenStates(states)
    try:
        logits = model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=weight.device)).logits
    finally:
        if previous_forward is None:
            del trunk.__dict__["forward"]
        else:
            trunk.__dict__["forward"] = previous_forward
    if not torch.equal(logits.float(), head(states).float()):
        raise DitLoraError(
            f"{type(model).__name__}: its logits are more than its output layer makes of the hidden states "
            "(soft-capped, scaled or normed); its answers' losses would be those of another model"
        )
