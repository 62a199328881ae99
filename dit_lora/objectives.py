"""What a network is trained to predict: pure fp32 functions of (clean, noise, timestep).

Shapes: clean, noise, prediction are (B, ...); timesteps (B,) int64; losses (B,).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LossOutput(NamedTuple):
    """Per-sample losses, fp32 (B,), and the timesteps they were drawn at, int64 (B,)."""

    losses: torch.Tensor
    timesteps: torch.Tensor


def mean_squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per-sample mean over all but the first dimension, fp32 (B,)."""
    return (prediction.float() - target.float()).square().flatten(1).mean(1)


@dataclass(frozen=True)
class VPrediction:
    """Velocity prediction, `v = sqrt(a) * noise - sqrt(1 - a) * clean` (arXiv 2202.00512, section 4).

    Trains on v directly. The form that CogVideo's trainer and Diffusers' example use, the error of x0
    weighted by 1 / (1 - a), is the same loss on paper; in bf16 its weight reaches 1176 and its noise
    level rounds to zero.
    """

    alpha: torch.Tensor
    """sqrt of the cumulative product of alphas, fp32 (timesteps,)."""
    sigma: torch.Tensor
    """sqrt of one minus it, fp32 (timesteps,)."""

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: torch.Tensor) -> "VPrediction":
        """Square roots are taken in fp64 and rounded once."""
        wide = alphas_cumprod.double()
        return cls(wide.sqrt().float(), (1 - wide).sqrt().float())

    def add_noise(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        alpha, sigma = self._at(timesteps, clean)
        return alpha * clean.float() + sigma * noise.float()

    def target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        alpha, sigma = self._at(timesteps, clean)
        return alpha * noise.float() - sigma * clean.float()

    def _at(self, timesteps: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, *[1] * (like.ndim - 1))
        alpha, sigma = self.alpha.to(like.device), self.sigma.to(like.device)
        return alpha[timesteps].view(shape), sigma[timesteps].view(shape)
