"""Matrices in their best low rank: LoRA factors by singular values in fp64, and the energy that a rank keeps.

PEFT's `convert_to_lora` and `add_weighted_adapter` (`svd`) cut in the same way: the first an adapter of any kind in a
model in memory, the second at least two adapters, both with an SVD of each full product and no report of its energy.
Here a difference has no adapter, and the product of two factors needs no SVD larger than their rank.
"""

from dataclasses import dataclass

import torch

from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.results.export.updates import Term


@dataclass(frozen=True)
class RankChoice:
    """The choice of a rank: a number for all layers, or the share of each layer's energy that its own is to keep."""

    rank: int | None = None
    energy: float = 1.0

    def rank_for(self, energies: torch.Tensor) -> int:
        """Return a layer's rank by its energies, the largest first."""
        if self.rank is not None:
            return self.rank
        reached = energies.cumsum(0)
        wanted = self.energy * reached[-1]
        return min(int(torch.searchsorted(reached, wanted)) + 1, len(energies))


@dataclass(frozen=True)
class LowRankLayer:
    """One layer at its new rank; squares are of Frobenius norms."""

    name: str
    stored: StoredLayer
    whole: float
    """The square of what was there."""
    kept: float
    """The square of what is in the rank."""
    size: int
    """The rank that would hold all of any change: the smaller side of the layer's weight."""

    @property
    def energy(self) -> float:
        """The share of the layer's energy that the rank keeps."""
        return min(1.0, self.kept / self.whole) if self.whole else 1.0


def factor_difference(name: str, difference: torch.Tensor, choice: RankChoice) -> LowRankLayer:
    """Return the best factors of a change that is not zero, in the shape of a layer's weight."""
    matrix = difference.double().flatten(1)
    b, a = _factors(matrix, choice)
    return _layer(name, b, a, difference.shape[1:], matrix.square().sum().item(), min(matrix.shape))


def factor_update(name: str, term: Term, choice: RankChoice) -> LowRankLayer:
    """Return the best factors of an update that is itself a product, without the product."""
    left, upper = torch.linalg.qr(term.b.double().flatten(1))
    right, lower = torch.linalg.qr(term.a.double().flatten(1).T)
    core = term.scale * upper @ lower.T
    b, a = _factors(core, choice)
    whole = core.square().sum().item()
    sides = (len(term.b), term.a[0].numel())
    return _layer(name, left @ b, a @ right.T, term.a.shape[1:], whole, min(sides))


def _layer(
    name: str, b: torch.Tensor, a: torch.Tensor, inputs: torch.Size, whole: float, size: int
) -> LowRankLayer:
    """Return the layer in fp32, with alpha at the rank: every loader has the same scale then."""
    rank, ones = len(a), [1] * (len(inputs) - 1)
    stored = StoredLayer(
        a.reshape(rank, *inputs).float().contiguous().cpu(),
        b.reshape(len(b), rank, *ones).float().contiguous().cpu(),
        rank,
    )
    # Rows of A have the length 1 and columns of B are at right angles, so that B has the whole norm.
    return LowRankLayer(name, stored, whole, b.square().sum().item(), size)


def _factors(matrix: torch.Tensor, choice: RankChoice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B and A, B having the singular values, as PEFT's `convert_to_lora` divides them.

    Singular vectors are eigenvectors of the smaller Gram matrix: in fp64, values below 1e-8 of the largest are lost in
    it, and no fp32 file could say them.
    """
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    energies, vectors = torch.linalg.eigh(wide @ wide.T)
    energies, vectors = energies.flip(0).clamp(min=0), vectors.flip(1)
    chosen = vectors[:, : choice.rank_for(energies)]
    projected = chosen.T @ wide
    values = torch.linalg.vector_norm(projected, dim=1)
    # Where the rank is above that of the matrix, a row of zeros stays one.
    unit = projected / values.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    if wide is matrix:
        return chosen * values, unit
    return unit.T * values, chosen.T
