"""OpenDiT's fused modulation (k_fused_modulate.py:38): every sample gets the first one's scale and shift.

Forward it is a function of the first sample's condition alone, and backward each sample's own condition gets the
gradient: not the gradient of what was computed. The loss falls at first, then training diverges, in fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from micro_batches import fake_batch
from torch import nn

from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.families.dit.classes import disable_label_dropout, initialize_weights
from dit_lora.guard.comparison.parity import KernelDifference, find_first_difference
from dit_lora.guard.fallbacks import Fallback
from dit_lora.numerics.objectives import EpsilonPrediction
from dit_lora.numerics.streams import RandomStreams

CLASSES, STEPS = 10, 300
Batch = dict[str, torch.Tensor]


def fresh_model() -> Any:
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=3,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    )
    initialize_weights(model)
    disable_label_dropout(model)
    return model


def mix_rows(model: Any) -> dict[str, bool]:
    """The bug in every modulation; gates are right, as they were. The dict switches it."""
    state = {"on": True}

    def wrong(shares: int, mixed: tuple[int, ...]) -> Callable[..., torch.Tensor]:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            if not state["on"]:
                return output
            parts = output.chunk(shares, 1)
            return torch.cat(
                [
                    # The first one's value, with the own one's gradient.
                    part + (part[:1] - part).detach() if index in mixed else part
                    for index, part in enumerate(parts)
                ],
                1,
            )

        return hook

    for block in model.transformer_blocks:  # shift, scale, gate of attention; the same of the MLP
        block.norm1.linear.register_forward_hook(wrong(6, (0, 1, 3, 4)))
    model.proj_out_1.register_forward_hook(wrong(2, (0, 1)))
    return state


def losses_of_training(*, mixed: bool) -> torch.Tensor:
    """Ten classes, each its own picture with a little noise; equal seeds, AdamW at 2e-3, clip 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = fresh_model()
        if mixed:
            mix_rows(model)
        objective = EpsilonPrediction.from_betas(torch.linspace(1e-4, 0.02, 1000))
        pictures = torch.randn(CLASSES, 4, 4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
        losses = []
        for _ in range(STEPS):
            labels, t = torch.randint(0, CLASSES, (24,)), torch.randint(0, 1000, (24,))
            clean = pictures[labels] + 0.1 * torch.randn(24, 4, 4, 4)
            noise = torch.randn_like(clean)
            noisy = objective.add_noise(clean, noise, t)
            output = model(noisy, timestep=t, class_labels=labels).sample
            loss = (output - noise).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.thorough
def test_training_with_mixed_rows_does_not_learn_what_it_learns_without() -> None:
    """Nothing is ever NaN: no check of values alone would see it."""
    right, mixed = losses_of_training(mixed=False), losses_of_training(mixed=True)
    assert torch.isfinite(mixed).all()
    assert right[-50:].mean() < 0.5
    assert mixed[-50:].mean() > 2 * right[-50:].mean()
    # It falls first, as the reports say, and then goes back up.
    assert mixed[20:60].mean() < mixed[:5].mean()


@contextmanager
def off(state: dict[str, bool]) -> Iterator[None]:
    state["on"] = False
    try:
        yield
    finally:
        state["on"] = True


def difference(checkpoint: Any, model: Any, state: dict[str, bool], size: int) -> KernelDifference | None:
    """What preflight makes of a kernel with this switch, on a micro-batch of that size."""
    g = torch.Generator().manual_seed(3)
    latent = {name: torch.randn(size, 4, 4, 4, generator=g) for name in ("latent_mean", "latent_logvar")}
    batch: Batch = {**latent, "class_labels": torch.arange(size) * 3}

    def forward() -> Any:
        return checkpoint.denoiser.losses(model, batch, RandomStreams(0, range(size)))

    replayed = fake_batch((), 0, 0, 0, batch, forward, lambda _: replayed)
    switch = Fallback("kernel:modulate", "kernel", lambda: off(state), lambda: None, "its reference")
    return find_first_difference(switch, lambda: replayed.forward().losses, model.train())


@pytest.mark.parametrize("fresh", [True, False], ids=["from scratch", "trained"])
def test_preflight_names_the_kernel_and_where_it_is_wrong(tiny_checkpoints: dict[str, Path], fresh: bool) -> None:
    """Also in a model from scratch, whose modulations are zero for every sample before the first step."""
    scratch = {} if fresh else None
    config = ModelConfig(family="dit", path=str(tiny_checkpoints["dit-tiny"]), from_scratch=scratch)
    checkpoint: Any = get_family("dit").open(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = checkpoint.denoiser.load_transformer(torch.float32).requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = mix_rows(model)
    fault = difference(checkpoint, model, state, size=4)
    assert fault is not None
    assert fault.module.startswith("transformer_blocks.0.")
    assert difference(checkpoint, model, state, size=1) is None  # it is right for one sample
    state["on"] = False
    assert difference(checkpoint, model, {"on": False}, size=4) is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
