"""Modules that compute as one, because a kernel stands for what is inside them at the moment.

Their parts are not called. To observe a part would make the whole give way to it, and change what is observed.
"""

from collections.abc import Callable, Iterator

from torch import nn

_WHOLE = "_dit_lora_is_whole"
ONLY_COUNTS = "_dit_lora_only_counts"
"""An attribute of a hook on saved tensors that leaves them as they are."""


def set_whole(module: nn.Module, is_whole: Callable[[], bool] | None) -> None:
    """Say when this module computes as one; None for never. Kept beside its parameters, saved nowhere."""
    module.__dict__.pop(_WHOLE, None)
    if is_whole is not None:
        module.__dict__[_WHOLE] = is_whole


def whole_test(module: nn.Module) -> Callable[[], bool] | None:
    """Return what `set_whole` was given for this module; None if it never computes as one."""
    is_whole: Callable[[], bool] | None = module.__dict__.get(_WHOLE)
    return is_whole


def called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules` does, without the parts of modules that compute as one now."""
    parts: list[str] = []
    for name, module in model.named_modules():
        # Modules come in the order of the tree: the parts of the last whole follow it at once.
        if any(name.startswith(part) for part in parts[-1:]):
            continue
        yield name, module
        is_whole = whole_test(module)
        if is_whole is not None and is_whole():
            parts.append(f"{name}.")
