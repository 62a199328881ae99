"""Attach a LoRA adapter to a frozen model, through PEFT."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from diffusers.training_utils import cast_training_params
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_lora.adapters.kinds import create_peft_config, get_adapter_kind, require_adaptable, set_dora_magnitudes
from dit_lora.adapters.lora_mixins import add_adapter_methods
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.streams import derive_seed

# Diffusers', Transformers' and PEFT's name for the first adapter.
PEFT_PREFIX = "base_model.model."
"""Prefix of names in PEFT's state dicts: the wrapper and the model in it."""
ADAPTER_NAME = "default"
FROZEN_ADAPTER_PREFIX = "under_"
"""Prefix of the names of frozen adapters from `lora.under`, which are numbered in the recipe's order."""


@dataclass(frozen=True)
class AttachReport:
    """Result of attaching an adapter: numbers of adapted layers and of trainable parameters."""

    num_adapted: int
    """Number of adapted linear layers."""
    num_linear: int
    num_parameters: int
    num_convolutions: int = 0
    """Number of adapted 2D convolutions."""
    kind: str = "lora"

    def __str__(self) -> str:
        convolutions = f" and {self.num_convolutions} convolutions" if self.num_convolutions else ""
        return f"{self.kind}: {self.num_adapted} of {self.num_linear} linear layers{convolutions}"


def attach_lora(
    model: nn.Module, lora: LoraConfig, default_targets: Sequence[str], *, seed: int, submodules: Sequence[str] = ()
) -> AttachReport:
    """Add an fp32 adapter of `lora.kind` to the layers that `lora.targets` matches. It has no effect before the first
    step.

    Args:
        model: Frozen model.
        lora: Section of the recipe.
        default_targets: Targets if `lora.targets` is None.
        seed: The initial weights depend only on it, so that all ranks start with the same ones.
        submodules: Names of submodules, such as `language_model`. A target that matches layers inside them is not
            applied anywhere else. A target that matches nothing inside is applied wherever it matches: `lm_head`, or
            `visual.blocks.3.attn.qkv`.

    Linear layers and 2D convolutions without groups can be adapted (with OFT: linear layers only). Raises
    `DitLoraError` if a target matches nothing, if a layer shares its weight with another module, or if PEFT's layer of
    this kind cannot adapt a quantized one.
    """
    # Check everything before PEFT changes the model.
    targets = list(lora.targets or default_targets)
    linear, layers = _find_linear_layers(model), find_adaptable_layers(model)
    _require_matching_layers(type(model).__name__, targets, linear, _find_convolutions(model))
    # PEFT has no option for submodules: one regular expression says the same.
    pattern = _build_target_pattern(targets, submodules, layers) if submodules else None
    adapted = match_target_names(layers, pattern or targets)
    require_untied_layers(model, adapted)
    require_adaptable(model, adapted, lora)
    return add_adapter(model, create_peft_config(lora, pattern or targets), seed=seed)


def add_adapter(model: nn.Module, config: peft.PeftConfig, *, seed: int) -> AttachReport:
    """Add a trainable fp32 adapter with PEFT's config. Its initial weights depend only on `seed`."""
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    # Initializing A must not advance the random state of the run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora_init"))
        # Models without this method get it from Diffusers' mixin.
        add_adapter_methods(model).add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    # AdamW on half-precision parameters loses small updates, and its eps of 1e-8 is 0 in fp16.
    cast_training_params(model, dtype=torch.float32)
    set_dora_magnitudes(model, ADAPTER_NAME)
    # The base is frozen, so these are the adapter's parameters.
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapted = [layer.get_base_layer() for layer in find_tuner_layers(model)]
    matrices = sum(isinstance(base, nn.Linear) for base in adapted)
    kind = get_adapter_kind(config)
    return AttachReport(matrices, linear, parameters, len(adapted) - matrices, kind)


def is_lora_a(name: str) -> bool:
    return ".lora_A." in name


def is_lora_b(name: str) -> bool:
    return ".lora_B." in name


def is_frozen_adapter(name: str) -> bool:
    """True if a parameter's name is that of a frozen adapter from `lora.under`."""
    return (is_lora_a(name) or is_lora_b(name)) and f".{FROZEN_ADAPTER_PREFIX}" in name


def get_adapter_state(model: Any, adapter: str = ADAPTER_NAME) -> dict[str, torch.Tensor]:
    """Tensors of an attached adapter, by the names that adapter files use."""
    state = peft.get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    # A `PeftModel` puts its own attributes before the names; a model with injected layers does not.
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in state.items()}


def find_tuner_layers(model: nn.Module) -> list[Any]:
    """A model's layers with a PEFT adapter."""
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def find_adaptable_layers(model: nn.Module) -> list[str]:
    """Names of the layers that can have an adapter: linear layers, and 2D convolutions without groups."""
    return [*_find_linear_layers(model), *_find_convolutions(model)]


def _find_linear_layers(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def _find_convolutions(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        # PEFT needs a rank that is divisible by groups, which is too large for depthwise convolutions.
        if isinstance(module, nn.Conv2d) and module.groups == 1
    ]


def find_tied_layers(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The layers that share their weight with another module, such as an output head with the embedding."""
    # Without removing duplicates, a shared parameter occurs once for each module that has it.
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return [name for name in names if uses[id(model.get_submodule(name).weight)] > 1]


def require_untied_layers(model: nn.Module, names: Iterable[str]) -> None:
    tied = find_tied_layers(model, names)
    if tied:
        # PEFT would adapt only one use of the weight, and a merged checkpoint could not represent that.
        message = (
            f"lora.targets: these layers of {type(model).__name__} share their weight with another module "
            "(tie_word_embeddings); remove them from lora.targets"
        )
        raise DitLoraError(format_list(message, tied))


def match_target_names(names: Sequence[str], targets: str | Sequence[str]) -> list[str]:
    """Layer names that match PEFT's targets: a regular expression for the whole name, or a list of name endings."""
    if isinstance(targets, str):
        return [name for name in names if re.fullmatch(targets, name)]
    # The dot before both: `to_q` must not match `my_to_q`.
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in targets)]


def _build_target_pattern(targets: Sequence[str], submodules: Sequence[str], names: Sequence[str]) -> str:
    """One regular expression for all targets. A target that matches layers inside `submodules` matches only those; any
    other target matches everywhere.
    """
    # Layers with one of the submodules in their path, at any depth.
    inside = [name for name in names if any(f".{part}." in f".{name}" for part in submodules)]
    if not inside:
        message = "these submodules, which LoRA is limited to, have no linear layer"
        raise DitLoraError(format_list(message, submodules))
    inside_targets = [target for target in targets if match_target_names(inside, [target])]
    other_targets = [target for target in targets if target not in inside_targets]
    parts = []
    if inside_targets:
        # The look-ahead requires one of the submodules in the path; then the end of the path is matched.
        ahead = rf"(?=(?:.*\.)?(?:{_join_alternatives(submodules)})\.)"
        parts.append(rf"{ahead}(?:.*\.)?(?:{_join_alternatives(inside_targets)})")
    if other_targets:
        parts.append(rf"(?:.*\.)?(?:{_join_alternatives(other_targets)})")
    return "|".join(parts)


def _join_alternatives(names: Sequence[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def _require_matching_layers(model: str, targets: list[str], linear: list[str], convolutions: list[str]) -> None:
    names = (*linear, *convolutions)
    unmatched = [target for target in targets if not match_target_names(names, [target])]
    if unmatched:
        suffixes = [f"{suffix} ({count})" for suffix, count in _count_suffixes(linear).items()]
        suffixes += [f"{suffix} ({count}, convolutions)" for suffix, count in _count_suffixes(convolutions).items()]
        message = f"lora.targets: these match no linear layer of {model}: {', '.join(unmatched)}; it has"
        raise DitLoraError(format_list(message, suffixes))


def _count_suffixes(names: list[str]) -> Counter[str]:
    """Number of layers for each short target name that a user would write, such as `to_q` or `to_out.0`."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        # `to_out.0` and `net.2` keep two parts: the number by itself would say nothing.
        counts[".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])] += 1
    return counts
