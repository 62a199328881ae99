"""Masks of the loss, over every family: what is outside of one is not learned, bit for bit; a floor weighs it."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from family_cases.subject import Subject, encoded_batch

from dit_lora.families.latents import LOSS_MASK, compute_loss_weights, downscale_mask
from dit_lora.numerics.objectives import LossOutput, compute_mean_squared_error
from dit_lora.numerics.streams import RandomStreams


def spied(subject: Subject) -> tuple[Any, dict[str, torch.Tensor]]:
    """A denoiser whose network is not run, with its clean latents: its prediction is a random leaf tensor."""
    recorded: dict[str, torch.Tensor] = {}
    denoiser: Any = subject.checkpoint.denoiser
    original = denoiser.objective

    class Objective(type(original)):  # type: ignore[misc]
        def add_noise(self, clean: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            recorded["clean"] = clean
            return original.add_noise(clean, *rest)  # type: ignore[no-any-return]

    class Predicting(type(denoiser)):  # type: ignore[misc]
        def predict(self, transformer: Any, noisy: torch.Tensor, *rest: Any) -> torch.Tensor:
            channels = 2 if getattr(self, "has_learned_variance", False) else 1
            generator = torch.Generator().manual_seed(1)
            leaf = torch.randn(torch.cat([noisy] * channels, dim=1).shape, generator=generator)
            recorded["prediction"] = leaf.requires_grad_()
            return recorded["prediction"]

        predict_in_training = _predict_in_training = predict

    values = {field.name: getattr(denoiser, field.name) for field in fields(denoiser) if field.init}
    return Predicting(**{**values, "objective": Objective(**vars(original))}), recorded


def losses(denoiser: Any, batch: dict[str, torch.Tensor]) -> LossOutput:
    output: LossOutput = denoiser.losses(torch.nn.Identity(), batch, RandomStreams(0, [4, 5, 6]))
    return output


def masked_batch(subject: Subject) -> dict[str, torch.Tensor]:
    batch = encoded_batch(subject)
    rows, size = len(batch["latent_mean"]), batch["latent_mean"].shape[-2:]
    chosen = torch.rand(rows, *size, generator=torch.Generator().manual_seed(7)) < 0.4
    if "latent_logvar" in batch:
        batch["latent_logvar"] = torch.full_like(batch["latent_logvar"], -60.0)
    return {**batch, LOSS_MASK: chosen.float()}


def where_masked(denoiser: Any, seen: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Elements of the prediction that depend on latents inside the mask, however the family transforms them."""
    mean, mask = batch["latent_mean"], batch[LOSS_MASK]
    inside = mask.view(len(mask), *[1] * (mean.ndim - 3), *mask.shape[-2:]).expand_as(mean)
    clean = []
    for latents in (torch.zeros_like(mean), inside):
        losses(denoiser, {**batch, "latent_mean": latents})
        clean.append(seen["clean"])
    return clean[0] != clean[1]


def test_no_gradient_comes_from_outside_of_a_mask(pipeline_subject: Subject) -> None:
    denoiser, recorded = spied(pipeline_subject)
    batch = masked_batch(pipeline_subject)
    expected = where_masked(denoiser, recorded, batch)
    losses(denoiser, batch).losses.sum().backward()
    gradient = recorded["prediction"].grad
    assert gradient is not None
    # The first half of a network that learns its variance is the prediction.
    for part in gradient.split(expected.shape[1], dim=1):
        has_gradient = part != 0
        assert not (has_gradient & ~expected).any()
        assert has_gradient.flatten(1).any(1).all()
    head = gradient[:, : expected.shape[1]]
    # Some frames are given to the network: nothing is learned there, masked or not.
    full = losses(denoiser, {**batch, LOSS_MASK: torch.ones_like(batch[LOSS_MASK])})
    full.losses.sum().backward()
    everywhere = recorded["prediction"].grad
    assert everywhere is not None
    learned = everywhere[:, : expected.shape[1]] != 0
    assert torch.equal(head != 0, expected & learned)
    assert not (head != 0).all()


def test_the_loss_is_the_mean_over_what_is_learned(pipeline_subject: Subject) -> None:
    """A mask of ones is as none; with a floor, the rest counts as much as it says."""
    denoiser, _ = spied(pipeline_subject)
    batch = masked_batch(pipeline_subject)
    plain = losses(denoiser, {k: v for k, v in batch.items() if k != LOSS_MASK}).losses
    ones = losses(denoiser, {**batch, LOSS_MASK: torch.ones_like(batch[LOSS_MASK])}).losses
    torch.testing.assert_close(ones, plain, rtol=1e-5, atol=0)
    inside = losses(denoiser, batch).losses.double()
    outside = losses(denoiser, {**batch, LOSS_MASK: 1 - batch[LOSS_MASK]}).losses.double()
    share = batch[LOSS_MASK].flatten(1).mean(1).double()
    weights = share, 0.25 * (1 - share)
    expected = (weights[0] * inside + weights[1] * outside) / sum(weights)
    floored = losses(replace(denoiser, mask_floor=0.25), batch).losses
    torch.testing.assert_close(floored.double(), expected, rtol=1e-5, atol=0)
    assert len(set(inside.tolist())) == 3


def test_a_latent_weighs_as_the_mean_of_its_pixels() -> None:
    mask = torch.zeros(12, 16)
    mask[:4, :6] = 1.0
    mask[8:, 12:] = 0.5
    weights = downscale_mask(mask, torch.empty(16, 5, 3, 4))
    expected = torch.tensor([[1.0, 0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0.5]])
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("ndim", [4, 5])
def test_weights_are_broadcast_over_channels_and_frames(ndim: int) -> None:
    mask = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    like = torch.empty(2, 4, *[6] * (ndim - 4), 3, 5)
    weights = compute_loss_weights({LOSS_MASK: mask}, 0.2, like)
    assert weights is not None
    expected = (0.2 + 0.8 * mask).view(2, *[1] * (ndim - 3), 3, 5).expand_as(like)
    assert torch.equal(weights.expand_as(like), expected)
    assert compute_loss_weights({}, 0.2, like) is None


def test_weighted_errors_are_those_of_fp64() -> None:
    generator = torch.Generator().manual_seed(2)
    prediction, target = torch.randn(2, 3, 4, 5, 7, generator=generator).unbind(0)
    weights = torch.rand(3, 1, 5, 7, generator=generator)
    expected = (prediction.double() - target.double()).square() * weights.double()
    total = weights.double().expand_as(expected).flatten(1).sum(1)
    torch.testing.assert_close(
        compute_mean_squared_error(prediction, target, weights).double(),
        expected.flatten(1).sum(1) / total,
        rtol=1e-6,
        atol=0,
    )
