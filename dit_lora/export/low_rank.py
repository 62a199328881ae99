"""Best low-rank approximation of matrices: LoRA factors from singular values in fp64, and the energy they keep.

PEFT's `convert_to_lora` and `add_weighted_adapter` (`svd`) truncate in the same way. The first takes an adapter of any
kind in a model in memory, the second at least two adapters; both need an SVD of each full product, and do not report
the energy. Here a difference needs no adapter, and a product of two factors needs no SVD larger than their rank.
"""

from dataclasses import dataclass

import torch

from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.export.weight_delta import LoraTerm


@dataclass(frozen=True)
class RankChoice:
    """How to choose a LoRA's rank.

    It is one rank for all layers, or for each layer the smallest that keeps this share of its energy.
    """

    rank: int | None = None
    energy: float = 1.0

    def choose_rank(self, energies: torch.Tensor) -> int:
        """Choose a layer's rank from its energies (squared singular values), the largest first."""
        if self.rank is not None:
            return self.rank
        # reached[i] is the energy that rank i + 1 keeps.
        reached = energies.cumsum(0)
        min_energy = self.energy * reached[-1]
        # If the sum at index i is the first to reach the share, the rank is i + 1.
        return min(int(torch.searchsorted(reached, min_energy)) + 1, len(energies))


@dataclass(frozen=True)
class LowRankLayer:
    """One layer's LoRA at its new rank. Energies are squared Frobenius norms."""

    name: str
    factors: StoredLayer
    total_energy: float
    """Squared Frobenius norm of the full change."""
    kept_energy: float
    """Squared Frobenius norm kept at this rank."""
    max_rank: int
    """The rank that can hold any change: the smaller side of the layer's weight."""

    @property
    def energy_share(self) -> float:
        """Share of the layer's energy that the rank keeps, 0 to 1."""
        return min(1.0, self.kept_energy / self.total_energy) if self.total_energy else 1.0


def factor_weight_difference(name: str, difference: torch.Tensor, rank_choice: RankChoice) -> LowRankLayer:
    """Factor a nonzero change, in the shape of the layer's weight, into A and B."""
    # (outputs, inputs), with a convolution's kernel flattened into the inputs.
    matrix = difference.double().flatten(1)
    b, a = _factorize(matrix, rank_choice)
    return _build_layer(name, b, a, difference.shape[1:], matrix.square().sum().item(), min(matrix.shape))


def factor_update(name: str, term: LoraTerm, rank_choice: RankChoice) -> LowRankLayer:
    """Factor an update that is already a product of two factors into A and B of lower rank.

    The product is not computed.
    """
    # B = Q_b R_b with orthonormal columns in Q_b: only the small R_b matters for singular values.
    q_b, upper = torch.linalg.qr(term.b.double().flatten(1))
    # A^T = Q_a R_a in the same way.
    right, lower = torch.linalg.qr(term.a.double().flatten(1).T)
    # B A = Q_b (R_b R_a^T) Q_a^T: the small core, rank x rank, has the singular values of the product.
    core = term.scale * upper @ lower.T
    b, a = _factorize(core, rank_choice)
    total_energy = core.square().sum().item()
    sides = (len(term.b), term.a[0].numel())
    return _build_layer(name, q_b @ b, a @ right.T, term.a.shape[1:], total_energy, min(sides))


def _build_layer(
    name: str, b: torch.Tensor, a: torch.Tensor, input_shape: torch.Size, total_energy: float, max_rank: int
) -> LowRankLayer:
    """The layer's LoRA in fp32, with alpha equal to rank: then the scale is 1 in every loader."""
    # For a convolution A keeps the kernel's size and B is 1x1, as PEFT stores them.
    rank, ones = len(a), [1] * (len(input_shape) - 1)
    factors = StoredLayer(
        a.reshape(rank, *input_shape).float().contiguous().cpu(),
        b.reshape(len(b), rank, *ones).float().contiguous().cpu(),
        rank,
    )
    # Rows of A are orthonormal, so that the norm of the product is the norm of B.
    return LowRankLayer(name, factors, total_energy, b.square().sum().item(), max_rank)


def _factorize(matrix: torch.Tensor, rank_choice: RankChoice) -> tuple[torch.Tensor, torch.Tensor]:
    """B and A of a matrix's best low-rank approximation. The singular values are in B, as in PEFT's `convert_to_lora`.

    Singular vectors are eigenvectors of the smaller Gram matrix. In fp64, this loses values below 1e-8 of the largest,
    which no fp32 file could represent.
    """
    # Transposed if needed, so that rows <= columns and `wide_matrix @ wide_matrix.T` is the smaller Gram matrix.
    wide_matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    energies, vectors = torch.linalg.eigh(wide_matrix @ wide_matrix.T)
    # eigh sorts ascending; rounding can make the smallest eigenvalues negative.
    energies, vectors = energies.flip(0).clamp(min=0), vectors.flip(1)
    chosen = vectors[:, : rank_choice.choose_rank(energies)]
    # (rank, columns): the singular values times the right singular vectors.
    projected = chosen.T @ wide_matrix
    values = torch.linalg.vector_norm(projected, dim=1)
    # If the chosen rank is above that of the matrix, rows of zeros stay zero.
    unit = projected / values.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    # Undo the transposition: B is (outputs, rank) and A is (rank, inputs).
    if wide_matrix is matrix:
        return chosen * values, unit
    return unit.T * values, chosen.T
