"""Find which models an optimizer trains, and the names of its parameters."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.numerics.dtensors import get_original_class

Models = dict[str, nn.Module]
"""Models by the prefix of their parameters' names, which is empty for a single model."""


def find_trained_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    *,
    called_models: Sequence[nn.Module] = (),
    required: nn.Module | None = None,
) -> Models:
    """Find the models that a loop trains: those with parameters in its optimizers, and those a loss passes through.

    Optimizer parameters outside every model (a textual inversion's vector, say) form an extra model, which is never
    called.

    Raises:
        DitLoraError: If the optimizers hold no parameter of `required`.
    """
    # Parameters of the optimizers that belong to no model so far, by id.
    remaining = {id(p): p for candidate in optimizers for group in candidate.param_groups for p in group["params"]}
    owning_models: list[nn.Module] = []
    for model in models:
        model_ids = {id(p) for p in model.parameters()} & remaining.keys()
        # A model that the loss passes through may be frozen and still has calls to diagnose.
        if model_ids or any(model is candidate for candidate in called_models):
            owning_models.append(model)
        elif model is required:
            raise DitLoraError(
                f"Guard: the optimizer holds no parameter of the {get_original_class(model).__name__}; give the "
                "model and its optimizer, with Accelerate as returned by accelerator.prepare"
            )
        # A parameter shared by several models belongs to the first of them.
        remaining = {key: p for key, p in remaining.items() if key not in model_ids}
    names: list[str] = []
    for model in owning_models:
        name = get_original_class(model).__name__
        # The second model of a class and later ones get a number.
        count = sum(earlier.split("_")[0] == name for earlier in names)
        names.append(f"{name}_{count + 1}" if count else name)
    named_models = {f"{name}.": model for name, model in zip(names, owning_models, strict=True)}
    if remaining:
        holder = nn.Module()
        for number, parameter in enumerate(remaining.values()):
            # Put them in a module, which is never called, so that they have names like all other parameters.
            holder.register_parameter(f"parameter_{number}", parameter)
        named_models["optimizer."] = holder
    if len(named_models) > 1:
        return named_models
    # A single model needs no prefix. Without any model the result is empty.
    return dict(zip([""], named_models.values(), strict=False))


def find_called_parts(models: Models, called: Sequence[nn.Module]) -> Models:
    """Submodules of the models that the loop calls directly, by the prefix of their parameters' names."""
    # Whole models have their own entries.
    part_ids = {id(module) for module in called} - {id(model) for model in models.values()}
    return {
        f"{prefix}{name}.": module
        for prefix, model in models.items()
        for name, module in model.named_modules()
        if id(module) in part_ids
    }


def find_optimizer_parameters(
    models: Models, optimizers: Sequence[Any], trained_ids: Collection[int]
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers train, by name; `trained_ids` holds ids of those trained before."""
    optimizer_ids = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        prefix + name: parameter
        for prefix, model in models.items()
        for name, parameter in model.named_parameters()
        # GAN loops freeze parameters for a while; those trained before still count.
        if id(parameter) in optimizer_ids and (parameter.requires_grad or id(parameter) in trained_ids)
    }


def describe_models(models: Models) -> list[dict[str, Any]]:
    """Class, parameter counts and dtypes of each model, for guard.json."""
    entries = []
    for prefix, model in models.items():
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A dict keeps the order of first use, unlike a set.
        dtypes = {str(parameter.dtype).removeprefix("torch."): None for parameter in trained or parameters}
        entries.append(
            {
                "name": prefix.removesuffix(".") or get_original_class(model).__name__,
                "class": get_original_class(model).__name__,
                "parameters": sum(parameter.numel() for parameter in parameters),
                "trained": sum(parameter.numel() for parameter in trained),
                "dtypes": list(dtypes),
            }
        )
    return entries
