"""Find which models an optimizer trains, and the names of what it holds."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.numerics.dtensors import stock_class

Models = dict[str, nn.Module]
"""Models by the prefix of their parameters' names, which is empty for one that is alone."""


def trained_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    *,
    through: Sequence[nn.Module] = (),
    required: nn.Module | None = None,
) -> Models:
    """Return, in their order, the models whose parameters the optimizers hold, and those that a loss comes `through`.

    What they hold of no model (a textual inversion's vector, say) makes one more, which is never called.
    Raises `DitLoraError` if they hold nothing of the one that is `required`.
    """
    held = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    named: list[nn.Module] = []
    for model in models:
        own_ids = {id(p) for p in model.parameters()} & held.keys()
        if own_ids or any(model is one for one in through):
            named.append(model)
        elif model is required:
            raise DitLoraError(
                f"Guard: the optimizer holds no parameter of the {_name(model)}; give the model and the "
                "optimizer that trains it, under Accelerate both as accelerator.prepare returned them"
            )
        # A parameter that models share counts for the first of them.
        held = {key: p for key, p in held.items() if key not in own_ids}
    named_models = {f"{name}.": model for name, model in zip(_unique(named), named, strict=True)}
    if held:
        loose = nn.Module()
        for number, parameter in enumerate(held.values()):
            # In a module, which is never called, they have names as all others do.
            loose.register_parameter(f"parameter_{number}", parameter)
        named_models["optimizer."] = loose
    if len(named_models) > 1:
        return named_models
    return dict(zip([""], named_models.values(), strict=False))


def parts_of(models: Models, called: Sequence[nn.Module]) -> Models:
    """Return what is called by itself and is a part of one of the models, by the prefix of its parameters' names."""
    wanted = {id(module) for module in called} - {id(model) for model in models.values()}
    return {
        f"{prefix}{name}.": module
        for prefix, model in models.items()
        for name, module in model.named_modules()
        if id(module) in wanted
    }


def held_parameters(
    models: Models, optimizers: Sequence[Any], trained: Collection[int]
) -> dict[str, nn.Parameter]:
    """Return what the optimizers train, by name; `trained` are ids of what they have trained before."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    return {
        prefix + name: parameter
        for prefix, model in models.items()
        for name, parameter in model.named_parameters()
        if id(parameter) in held and (parameter.requires_grad or id(parameter) in trained)
    }


def trainable_parameters(models: Models) -> dict[str, nn.Parameter]:
    """Return what wants a gradient, by name: DeepSpeed's optimizer holds copies."""
    return {
        prefix + name: parameter
        for prefix, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _name(model: nn.Module) -> str:
    return stock_class(model).__name__


def _unique(models: Sequence[nn.Module]) -> list[str]:
    """Return class names, numbered from the second of a kind on."""
    names: list[str] = []
    for model in models:
        name = _name(model)
        again = sum(earlier.split("_")[0] == name for earlier in names)
        names.append(f"{name}_{again + 1}" if again else name)
    return names
