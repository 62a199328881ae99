"""Run a pipeline's adapters at a different strength, or several of them with weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft.tuners.oft import OFTLayer
from torch import nn

from dit_lora.adapters.attach import find_tuner_layers
from dit_lora.errors import DitLoraError

_PEFT_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)


@contextmanager
def scale_adapters(pipeline: Any, strength: float) -> Iterator[None]:
    """Multiply the scale of all adapters in a pipeline's models inside the context; 0 disables them.

    At 0 the models equal the base bit for bit, and at 1 nothing changes. Raises `DitLoraError` for OFT at other
    values: a rotation has no scale.
    """
    models = [component for component in pipeline.components.values() if isinstance(component, nn.Module)]
    layers: list[Any] = [layer for model in models for layer in find_tuner_layers(model)]
    if strength not in (0, 1) and any(isinstance(layer, OFTLayer) for layer in layers):
        raise DitLoraError(
            f"strength {strength:g}: OFT rotates, and PEFT has no part of a rotation; it is on (1) or off (0)"
        )
    if strength == 1:
        yield
        return
    # Copies of each layer's scales, to restore exactly these numbers.
    before = [dict(getattr(layer, "scaling", {})) for layer in layers]
    # Adapters are switched off rather than scaled by 0, so that outputs equal the base's exactly.
    off = [layer for layer in layers if strength == 0 and not layer.disable_adapters]
    for layer in off:
        layer.enable_adapters(False)
    for layer, scaling in zip(layers, before, strict=True) if strength else ():
        layer.scaling.update({name: strength * scale for name, scale in scaling.items()})
    try:
        yield
    finally:
        for layer in off:
            layer.enable_adapters(True)
        for layer, scaling in zip(layers, before, strict=True) if strength else ():
            layer.scaling.update(scaling)


def set_adapter_weights(pipeline: Any, names: Sequence[str], weights: Sequence[float]) -> None:
    """Activate several adapters of a pipeline together, each with its weight.

    Raises `DitLoraError` if that is impossible.
    """
    try:
        # Also multiplies the weights into the scales of the layers.
        pipeline.set_adapters(list(names), list(weights))
    except _PEFT_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise DitLoraError(f"these adapters do not act together: {reason}") from error
