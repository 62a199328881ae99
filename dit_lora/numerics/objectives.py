"""Training objectives in fp32: functions of (clean, noise, timestep), and the next-token loss.

Shapes: clean, noise, prediction are (B, ...); timesteps (B,) int64; losses (B,).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dit_lora.errors import DitLoraError
from dit_lora.numerics.noise_levels import LOGIT_NORMAL, NoiseLevelDistribution
from dit_lora.numerics.stop_gradient import stop_gradient

IGNORE_INDEX = -100
"""The label of a token that is not learned, as in Transformers and torch."""


class LossOutput(NamedTuple):
    """Per-sample losses, fp32 (B,), and the timesteps they were drawn at, int64 (B,)."""

    losses: torch.Tensor
    timesteps: torch.Tensor


def compute_mean_squared_error(
    prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean squared error of each sample over all other dimensions, fp32 (B,).

    `weights` are broadcast to the prediction and multiply each squared error; the sum is divided by the sum of the
    weights. NaN for a sample whose weights are all 0.
    """
    return _compute_weighted_mean((prediction.float() - target.float()).square(), weights)


def compute_next_token_losses(
    hidden: torch.Tensor, labels: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], *, chunk_size: int
) -> torch.Tensor:
    """Mean cross entropy of each sample over labels other than `IGNORE_INDEX`, fp32 (B,); NaN for a sample without
    any.

    Args:
        hidden: States that predict the labels, (B, A, D).
        labels: int64 (B, A).
        head: Maps (rows, D) to logits; log-sum-exp runs in fp32.
        chunk_size: Rows of logits in memory at a time. Backward recomputes them, with the same dropout.

    The values equal `F.cross_entropy(head(hidden).float().mT, labels)` of each sample.
    """
    if chunk_size < 1:
        raise DitLoraError(f"chunk_size must be at least 1 row; got {chunk_size}")
    # (B * A, D) and (B * A,), in chunks of rows: logits of the whole batch may not fit in memory.
    rows, targets = hidden.flatten(0, 1).split(chunk_size), labels.flatten().split(chunk_size)
    parts = [call_with_recomputation(_compute_cross_entropy, head, *part) for part in zip(rows, targets, strict=True)]
    # (B * A,) to (B, A), then the mean over the labels that count; 0 / 0 is NaN for a sample without any.
    return torch.cat(parts).view_as(labels).sum(1) / (labels != IGNORE_INDEX).sum(1)


def call_with_recomputation(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call a function and recompute its activations in the backward pass instead of saving them."""
    return checkpoint(function, *args, use_reentrant=False)


def _compute_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of each row of logits, fp32; 0 with zero gradient for ignored labels."""
    # Logits (rows, vocabulary).
    return F.cross_entropy(head(rows).float(), labels, ignore_index=IGNORE_INDEX, reduction="none")


@dataclass(frozen=True)
class VPrediction:
    """Velocity prediction, `v = sqrt(a) * noise - sqrt(1 - a) * clean` (arXiv 2202.00512, section 4).

    Trains on v directly. The form that CogVideo's trainer and Diffusers' example use, the error of x0
    weighted by 1 / (1 - a), is the same loss on paper. In bf16 its weight reaches 1176 and its noise
    level rounds to zero.
    """

    alpha: torch.Tensor
    """sqrt of the cumulative product of alphas, fp32 (timesteps,)."""
    sigma: torch.Tensor
    """sqrt(1 - alpha^2), fp32 (timesteps,)."""

    @property
    def num_train_timesteps(self) -> int:
        return len(self.alpha)

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: torch.Tensor) -> "VPrediction":
        """Build the fp32 tables of sqrt(a) and sqrt(1 - a) for each timestep from the scheduler's `alphas_cumprod`.

        Square roots are taken in fp64 and rounded once.
        """
        # In fp32, 1 - alpha^2 would lose digits where alpha is close to 1.
        alphas = alphas_cumprod.double()
        return cls(alphas.sqrt().float(), (1 - alphas).sqrt().float())

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        alpha, sigma = (_look_up_by_timestep(table, timesteps, clean) for table in (self.alpha, self.sigma))
        return alpha * clean.float() + sigma * noise.float()

    def compute_target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        alpha, sigma = (_look_up_by_timestep(table, timesteps, clean) for table in (self.alpha, self.sigma))
        return alpha * noise.float() - sigma * clean.float()


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow with a shifted noise level: `x = (1 - s) clean + s noise`, target `noise - clean`.

    Noise levels are shifted towards noise as in Stable Diffusion 3 (arXiv 2403.03206, section 5.3.2, equation 23).
    Logit-normal levels with mean 0 and standard deviation 1 have, at shift 3, 10 % below 0.454, 50 % below 0.750 and
    90 % below 0.915.
    """

    shift: float | None
    """`s' = shift s / (1 + (shift - 1) s)`; None if it depends on each sample's number of tokens."""
    num_train_timesteps: int
    """The network sees `s * num_train_timesteps`."""
    distribution: NoiseLevelDistribution = LOGIT_NORMAL
    """The density before the shift, and the range after it."""

    def compute_sigmas(self, gaussian: torch.Tensor, shift: float | None = None) -> torch.Tensor:
        """Noise levels (sigmas) for standard normal draws, fp32 in [0, 1). Give `shift` if the objective has none."""
        # An explicit shift, computed from a sample's number of tokens, takes precedence.
        shift = self.shift if shift is None else shift
        if shift is None:
            raise ValueError("this objective shifts by the number of tokens: give the shift")
        return self.distribution.compute_levels(gaussian, shift)

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        # (B,) to (B, 1, ..., 1).
        sigma = sigmas.float().view(-1, *[1] * (clean.ndim - 1))
        return (1 - sigma) * clean.float() + sigma * noise.float()

    def compute_target(self, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return noise.float() - clean.float()

    def convert_to_timesteps(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Convert noise levels in [0, 1) to integer timesteps, int64 from 0 to `num_train_timesteps` - 1."""
        return (sigmas * self.num_train_timesteps).long().clamp(0, self.num_train_timesteps - 1)


@dataclass(frozen=True)
class EpsilonPrediction:
    """Noise prediction with a learned variance, as improved DDPM and DiT train it (arXiv 2102.09672, section 3.1).

    The variance has its own loss term: the variational bound of one step, in bits per dimension, with the gradient of
    the mean stopped. It trains the variance and leaves the mean to the noise error.
    """

    alpha: torch.Tensor
    """sqrt of the cumulative product of alphas, fp32 (timesteps,)."""
    sigma: torch.Tensor
    """sqrt(1 - alpha^2), fp32 (timesteps,)."""
    log_beta: torch.Tensor
    """The largest log variance of a step, fp32 (timesteps,)."""
    log_posterior_variance: torch.Tensor
    """The smallest log variance, that of q(x_{t-1} | x_t, x_0). At t = 0 the variance is zero, and t = 1's is used."""
    clean_coefficient: torch.Tensor
    """Weight of x_0 in the mean of q(x_{t-1} | x_t, x_0), fp32 (timesteps,)."""
    noisy_coefficient: torch.Tensor
    """Weight of x_t in the same mean, fp32 (timesteps,)."""

    @property
    def num_train_timesteps(self) -> int:
        return len(self.alpha)

    @classmethod
    def from_betas(cls, betas: torch.Tensor) -> "EpsilonPrediction":
        """Build the fp32 tables of the noise schedule for each timestep from the scheduler's `betas`.

        Everything is computed in fp64 and rounded once.
        """
        beta = betas.double()
        cumprod = (1 - beta).cumprod(0)
        # Cumulative product of the step before; 1 before the first step, where nothing is noisy yet.
        previous = torch.cat([torch.ones(1, dtype=torch.float64), cumprod[:-1]])
        # Variance of the posterior q(x_{t-1} | x_t, x_0), equation 7 of DDPM (arXiv 2006.11239).
        variance = beta * (1 - previous) / (1 - cumprod)
        # It is zero at t = 0, where its logarithm would be -inf.
        variance[0] = variance[1]
        # In the order of the fields; the last two are the coefficients of x_0 and x_t in the posterior's mean.
        tables = (
            cumprod.sqrt(),
            (1 - cumprod).sqrt(),
            beta.log(),
            variance.log(),
            previous.sqrt() * beta / (1 - cumprod),
            (1 - beta).sqrt() * (1 - previous) / (1 - cumprod),
        )
        return cls(*(values.float() for values in tables))

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        alpha, sigma = (_look_up_by_timestep(table, timesteps, clean) for table in (self.alpha, self.sigma))
        return alpha * clean.float() + sigma * noise.float()

    def compute_variational_bound(
        self,
        prediction: torch.Tensor,
        variance_fraction: torch.Tensor,
        clean: torch.Tensor,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each sample's term of the bound in bits per dimension, fp32 (B,). Only `variance_fraction` gets a gradient.

        Args:
            prediction: Predicted noise.
            variance_fraction: The network's output for the variance: -1 is the smallest log variance, 1 the largest.
            weights: As in `compute_mean_squared_error`.

        At t = 0 the term is the negative log-likelihood of `clean` in bins of 2/255, elsewhere a Kullback-Leibler
        divergence.
        """
        # Each (B, 1, ..., 1).
        alpha, sigma, high, low, clean_share, noisy_share = (
            _look_up_by_timestep(table, timesteps, clean)
            for table in (
                *(self.alpha, self.sigma, self.log_beta, self.log_posterior_variance),
                *(self.clean_coefficient, self.noisy_coefficient),
            )
        )
        share = (variance_fraction.float() + 1) / 2
        # Interpolated between the two log variances, section 3.1 of the paper.
        log_variance = share * high + (1 - share) * low
        # x_0 from the predicted noise; a constant, because this loss trains only the variance.
        guess = (noisy.float() - sigma * stop_gradient(prediction).float()) / alpha
        mean = clean_share * guess + noisy_share * noisy.float()
        error = clean_share * (clean.float() - guess)  # of the mean
        # Divergence of the posterior (variance exp(low)) from the prediction (variance exp(log_variance)).
        divergence = 0.5 * (
            log_variance - low - 1 + (low - log_variance).exp() + error.square() * (-log_variance).exp()
        )
        likelihood = _compute_binned_log_likelihood(clean.float(), mean, 0.5 * log_variance)
        # Both terms are computed for all samples; `where` takes the one that applies, without a synchronization.
        nats = torch.where(timesteps.view_as(alpha) == 0, -likelihood, divergence)
        # From nats to bits.
        return _compute_weighted_mean(nats, weights) / math.log(2)


def _compute_weighted_mean(values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return values.flatten(1).mean(1)
    # After the expansion each element of a sample has its weight, so that sums need no further factors.
    weights = weights.float().expand_as(values)
    return (values * weights).flatten(1).sum(1) / weights.flatten(1).sum(1)


def _look_up_by_timestep(table: torch.Tensor, timesteps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    # (B,) to (B, 1, ..., 1), to broadcast over each sample.
    return table.to(reference.device, non_blocking=True)[timesteps].view(-1, *[1] * (reference.ndim - 1))


def _compute_binned_log_likelihood(x: torch.Tensor, mean: torch.Tensor, log_deviation: torch.Tensor) -> torch.Tensor:
    """Log probability of the 8-bit pixel bin around x under a normal distribution. The outermost bins are open.

    Probabilities are clamped at 1e-12, as in the code that DiT was trained with. That code, and OpenDiT's,
    approximates the normal CDF with a tanh: their losses at t = 0 differ from this one by 0.6 to 1.4 %.
    """
    inverse, distance = (-log_deviation).exp(), x - mean
    # Computed in the lower tail, by symmetry: there, differences of small numbers keep their precision.
    near_edge_cdf = torch.special.ndtr((1 / 255 - distance.abs()) * inverse)
    far_edge_cdf = torch.special.ndtr((-1 / 255 - distance.abs()) * inverse)
    upper_open_bin = torch.special.ndtr((1 / 255 - distance) * inverse)
    lower_open_bin = torch.special.ndtr((distance + 1 / 255) * inverse)
    # Pixel values 0 and 255 are x = -1 and 1: their bins extend to infinity.
    inside = torch.where(
        x > 0.999, upper_open_bin, torch.where(x < -0.999, lower_open_bin, near_edge_cdf - far_edge_cdf)
    )
    return inside.clamp(min=1e-12).log()
