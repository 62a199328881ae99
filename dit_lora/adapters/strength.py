"""Adapters of a pipeline at other strengths than they were trained at, and several of them by weight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_lora.errors import DitLoraError

_REFUSALS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)


@contextmanager
def at_strength(pipeline: Any, strength: float) -> Iterator[None]:
    """Let every adapter in a pipeline's models act that many times as strongly within; at 0 they are left out.

    At 0 the models are the base's bit for bit, and at 1 what they are without. What becomes of others is PEFT's scale,
    times the trained one. Raises `DitLoraError` for a rotation (OFT), which has none.
    """
    layers = list(_layers(pipeline))
    if strength not in (0, 1) and any(isinstance(layer, OFTLayer) for layer in layers):
        raise DitLoraError(
            f"strength {strength:g}: OFT rotates, and PEFT has no part of a rotation; it is on (1) or off (0)"
        )
    if strength == 1:
        yield
        return
    before = [dict(getattr(layer, "scaling", {})) for layer in layers]
    off = [layer for layer in layers if strength == 0 and not layer.disable_adapters]
    for layer in off:
        layer.enable_adapters(False)
    for layer, scaling in zip(layers, before, strict=True) if strength else ():
        layer.scaling.update({name: strength * one for name, one in scaling.items()})
    try:
        yield
    finally:
        for layer in off:
            layer.enable_adapters(True)
        for layer, scaling in zip(layers, before, strict=True) if strength else ():
            layer.scaling.update(scaling)


def weigh(pipeline: Any, names: Sequence[str], weights: Sequence[float]) -> None:
    """Let several adapters of a pipeline act together, each times its weight. Raises `DitLoraError` if they cannot."""
    try:
        pipeline.set_adapters(list(names), list(weights))
    except _REFUSALS as error:
        reason = str(error).strip().partition("\n")[0]
        raise DitLoraError(f"these adapters do not act together: {reason}") from error


def _layers(pipeline: Any) -> Iterator[Any]:
    """Yield the adapted layers of all models of a pipeline."""
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            yield from (one for one in component.modules() if isinstance(one, BaseTunerLayer))
