"""Modules that run as a single fused kernel, so that their submodules are not called.

A hook on a submodule would make the module fall back to its unfused form, and so change what is observed.
"""

from collections.abc import Callable, Iterator

from torch import nn

_FUSED_TEST = "_dit_lora_is_whole"
COUNTS_ONLY = "_dit_lora_only_counts"
"""An attribute of a hook on saved tensors that leaves them as they are."""


def set_fused_module_test(module: nn.Module, is_fused: Callable[[], bool] | None) -> None:
    """Set the function that tells whether a module runs as one fused kernel now; None removes it.

    It is not saved with the model.
    """
    module.__dict__.pop(_FUSED_TEST, None)
    if is_fused is not None:
        module.__dict__[_FUSED_TEST] = is_fused


def get_fused_module_test(module: nn.Module) -> Callable[[], bool] | None:
    """The function that `set_fused_module_test` set: is a module one fused kernel now? None if unset."""
    return module.__dict__.get(_FUSED_TEST)


def iterate_called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over a model's `named_modules`, without the submodules of modules that run as one fused kernel now."""
    # Prefixes of the submodules to leave out.
    parts: list[str] = []
    for name, module in model.named_modules():
        # Modules come depth first: the submodules of the last fused module follow it directly.
        if any(name.startswith(part) for part in parts[-1:]):
            continue
        yield name, module
        is_fused = get_fused_module_test(module)
        if is_fused is not None and is_fused():
            parts.append(f"{name}.")
