"""Attach a LoRA adapter to a frozen transformer, through PEFT."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import peft
import torch
from diffusers.training_utils import cast_training_params
from torch import nn

from dit_lora.adapters.loader import adaptable
from dit_lora.config import LoraConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.streams import fold

ADAPTER_NAME = "default"  # Diffusers' own name for the first adapter
_INITS: dict[str, Literal["gaussian"] | bool] = {"kaiming": True, "gaussian": "gaussian"}  # PEFT's


@dataclass(frozen=True)
class AttachReport:
    """What attaching changed."""

    adapted: int
    """Linear layers."""
    linear: int
    parameters: int
    convolutions: int = 0
    """2D convolutions that were adapted."""

    def __str__(self) -> str:
        convolutions = f" and {self.convolutions} convolutions" if self.convolutions else ""
        return (
            f"lora: {self.adapted} of {self.linear} linear layers{convolutions}, "
            f"{self.parameters:,} trainable parameters in fp32"
        )


def attach_lora(
    transformer: nn.Module, lora: LoraConfig, default_targets: Sequence[str], *, seed: int
) -> AttachReport:
    """Add fp32 LoRA matrices to the layers that `lora.targets` matches; B starts at zero.

    They may be linear layers and 2D convolutions without groups. Every target must match. The start depends on `seed` alone, so all ranks start alike.
    """
    targets = list(lora.targets or default_targets)
    linear = [name for name, m in transformer.named_modules() if isinstance(m, nn.Linear)]
    _require_matches(type(transformer).__name__, targets, linear, _convolutions(transformer))
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        init_lora_weights=_INITS[lora.init],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "lora_init"))
        adaptable(transformer).add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    # AdamW on half-precision parameters loses small updates, and its eps of 1e-8 is 0 in fp16.
    cast_training_params(transformer, dtype=torch.float32)
    trainable = [p for p in transformer.parameters() if p.requires_grad]
    adapted = [p for name, p in transformer.named_parameters() if is_lora_a(name)]
    matrices = sum(p.ndim == 2 for p in adapted)
    return AttachReport(
        matrices, len(linear), sum(p.numel() for p in trainable), len(adapted) - matrices
    )


def adapter_config(transformer: Any) -> dict[str, Any]:
    """PEFT's config of the attached adapter: rank, alpha, targets."""
    return transformer.peft_config[ADAPTER_NAME].to_dict()


def is_lora_a(name: str) -> bool:
    return ".lora_A." in name


def is_lora_b(name: str) -> bool:
    return ".lora_B." in name


def _convolutions(transformer: nn.Module) -> list[str]:
    return [
        name
        for name, module in transformer.named_modules()
        # PEFT needs a rank that groups divide, which no depthwise convolution allows.
        if isinstance(module, nn.Conv2d) and module.groups == 1
    ]


def _require_matches(
    model: str, targets: list[str], linear: list[str], convolutions: list[str]
) -> None:
    def matches(target: str) -> bool:  # PEFT's rule for a list of targets
        names = (*linear, *convolutions)
        return any(name == target or name.endswith(f".{target}") for name in names)

    unmatched = [target for target in targets if not matches(target)]
    if unmatched:
        other = [f"{suffix} ({n}, convolutions)" for suffix, n in _suffixes(convolutions).items()]
        raise DitLoraError(
            listed(
                f"lora.targets: these match no linear layer of {model}: {', '.join(unmatched)}; it has",
                [f"{suffix} ({count})" for suffix, count in _suffixes(linear).items()] + other,
            )
        )


def _suffixes(linear: list[str]) -> Counter[str]:
    """The shortest names that a user would write, with how many layers each matches."""
    counts: Counter[str] = Counter()
    for name in linear:
        parts = name.split(".")
        # `to_out.0` and `net.2`: a bare number says nothing.
        counts[".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])] += 1
    return counts
