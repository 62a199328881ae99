"""Adapters of tiny checkpoints, as if trained, and what they add to each weight, in fp64."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.adapters.groups import parameter_groups
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.config.lora import PEFT_ONLY_KINDS, AdapterKind
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family

Deltas = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """One adapter that was saved as a run saves it."""

    folder: Path
    model: Any
    """With the adapter in it, in inference mode."""
    base: Path
    checkpoint: Any


def trained(
    family: str,
    base: Path,
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 7,
    targets: tuple[str, ...] = (),
    kind: AdapterKind = "lora",
    connector: bool = False,
    seed: int = 1,
    scale: float = 0.1,
    digest: str = "d1",
) -> Trained:
    model_family = get_family(family)
    checkpoint = model_family.open(ModelConfig(family=family, path=str(base)))
    model = checkpoint.denoiser.load_transformer(torch.float32)
    size = {"block_size": rank} if kind == "oft" else {"rank": rank, "alpha": alpha}
    lora = LoraConfig(kind=kind, targets=targets, **size)
    attach_lora(model, lora, model_family.lora_targets, seed=0)
    if connector:
        parameter_groups(model, adapter=1e-4, connector=1e-5, patterns=model_family.group_patterns)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    metadata = {
        "family": family,
        "base_model": base.name,
        "transformer_digest": digest,
        "steps": 3,
        "rank": rank,
        "alpha": alpha,
    }
    if kind in PEFT_ONLY_KINDS:
        save_chat_adapter(model, folder, metadata)
    else:
        save_adapter(model, checkpoint.info.pipeline_class, folder, metadata)
    return Trained(folder, model.eval(), base, checkpoint)


def deltas(model: nn.Module) -> Deltas:
    """The update of every adapted layer by its name, of the one adapter that is in the model."""
    changes = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            ((adapter, a),) = layer.lora_A.items()
            b = layer.lora_B[adapter]
            changes[name.removeprefix("base_model.model.")] = product(a.weight, b.weight, layer.scaling[adapter])
    assert changes
    return changes


def product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale B A in fp64, in the shape of a linear layer's or a convolution's weight."""
    delta = torch.einsum("or,r...->o...", b.detach().double().flatten(1), a.detach().double())
    return scale * delta


def assert_same(found: Deltas, expected: Deltas) -> None:
    """All of them, but for rounding a factor to fp32 once."""
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        assert delta.abs().max() > 1e-3, name
        difference = (found[name] - delta).abs().max()
        assert difference <= 1e-6 * delta.abs().max(), f"{name}: {difference}"
