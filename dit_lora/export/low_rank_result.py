"""Report on LoRA layers at new ranks: the energy that they keep. Also attaches the layers to a meta model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_lora.adapters.attach import ADAPTER_NAME, find_adaptable_layers
from dit_lora.adapters.attach_file import build_exact_targets, build_peft_config
from dit_lora.adapters.diffusers_format import Tensors
from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.errors import DitLoraError, format_list
from dit_lora.export.low_rank import LowRankLayer, RankChoice
from dit_lora.export.meta_model import build_adapter_state, load_lora_state
from dit_lora.families.family import DiffusionFamily
from dit_lora.verify.checks import PATTERN_KEYS


@dataclass(frozen=True)
class LowRankResult:
    """The layers of one transformer at their new ranks, and the changes that no LoRA can hold."""

    layers: Sequence[LowRankLayer]
    excluded_energy: Mapping[str, float]
    """Squared Frobenius norm of the changes of other tensors, by name."""
    part: str = "transformer"

    @property
    def energy_share(self) -> float:
        """Share of the layers' energy that their ranks keep, 0 to 1."""
        # Rounding can push the quotient just above 1.
        total_energy = sum(layer.total_energy for layer in self.layers)
        return min(1.0, sum(layer.kept_energy for layer in self.layers) / total_energy)

    @property
    def total_energy_share(self) -> float:
        """Share of the energy of all changes, including tensors that no LoRA can hold."""
        return min(1.0, sum(layer.kept_energy for layer in self.layers) / self.total_energy)

    @property
    def total_energy(self) -> float:
        """Energy of all changes: the squared Frobenius norm."""
        return sum(layer.total_energy for layer in self.layers) + sum(self.excluded_energy.values())

    def to_dict(self) -> dict[str, Any]:
        """The report on a lower rank as JSON-compatible values."""
        total_energy = self.total_energy
        return {
            "part": self.part,
            "energy": self.energy_share,
            "of_all": self.total_energy_share,
            "layers": [
                {
                    "name": layer.name,
                    "rank": layer.factors.rank,
                    "energy": layer.energy_share,
                    "share": layer.total_energy / total_energy,
                }
                for layer in self.layers
            ],
            "left_out": {name: square / total_energy for name, square in self.excluded_energy.items()},
        }

    def format_lines(self) -> Iterator[str]:
        """The report as text.

        It has the total, every layer starting with the least energy kept, and every tensor that is left out.
        """
        record = self.to_dict()
        # With `--rank auto` every layer has its own rank.
        ranks = sorted({item.factors.rank for item in self.layers})
        rank = f"rank {ranks[0]} keeps" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} keep"
        yield f"{rank} {format_share(self.energy_share)} of the energy of {len(self.layers)} layers"
        # The layers that lose most come first.
        for item in sorted(self.layers, key=lambda item: item.energy_share):
            yield f"  {item.name}: {format_share(item.energy_share)}, rank {item.factors.rank}"
        if self.excluded_energy:
            share = format_share(sum(record["left_out"].values()))
            yield f"no LoRA holds what changed in these {len(self.excluded_energy)} tensors, {share} of all:"
            for name, part in sorted(record["left_out"].items(), key=lambda item: -item[1]):
                yield f"  {name}: {format_share(part)}"


def format_share(share: float) -> str:
    """Format a share in percent, with enough digits to distinguish it from 100 %."""
    # Four digits would round 0.99999 to 100 %: show the lost part instead.
    lost = 1 - share
    if 0 < lost < 1e-4 and share < 1:
        return f"all but {100 * lost:.1g}%"
    return f"{100 * share:.4g}%"


def require_valid_rank(layers: Sequence[LowRankLayer], rank_choice: RankChoice) -> None:
    """Raise `DitLoraError` with every layer whose weight has a side below the rank."""
    small = [layer for layer in layers if rank_choice.rank is not None and layer.max_rank < rank_choice.rank]
    if small:
        size = min(layer.max_rank for layer in small)
        summary = (
            f"--rank {rank_choice.rank} is above the size of these layers; give at most {size}, or --rank auto, where "
            "each layer has its own"
        )
        raise DitLoraError(format_list(summary, [f"{layer.name}: {layer.max_rank}" for layer in small]))


def attach_lora_layers(
    model: Any,
    layers: Mapping[str, StoredLayer],
    family: DiffusionFamily,
    description: str,
    base_weights: Tensors | None = None,
) -> None:
    """Attach LoRA layers to a meta model, with the base weights that were trained too."""
    # Targets that match exactly these layers of the model.
    targets = build_exact_targets(list(layers), find_adaptable_layers(model), [family.lora_targets])
    config = build_peft_config(layers, targets).to_dict()
    load_lora_state(model, build_adapter_state(layers), config, description, base_weights)


def get_rank_metadata(model: Any) -> dict[str, Any]:
    """Header entries for the ranks of an attached adapter whose alphas equal its ranks."""
    config = model.peft_config[ADAPTER_NAME]
    ranks = {"rank": config.r, "alpha": config.r}
    return ranks | {key: dict(getattr(config, key)) for key in PATTERN_KEYS if getattr(config, key)}
