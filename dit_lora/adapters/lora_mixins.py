"""LoRA for Diffusers' models and pipelines that have no LoRA loader of their own: DiT, Latte, PixArt.

Diffusers' mixins need nothing of a class but its modules, so an object's class is replaced by one that has
them too. Name, config and weights stay as they are, and so do the files that `save_pretrained` writes.
"""

from typing import Any, TypeVar

from diffusers.loaders import CogVideoXLoraLoaderMixin, PeftAdapterMixin
from torch import nn
from transformers import PreTrainedModel

Pipeline = TypeVar("Pipeline", bound=Any)


def with_lora(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline, with `load_lora_weights`, `set_adapters`, `unload_lora_weights` and the others.

    Changes nothing of a pipeline that has them.
    """
    for part in ("transformer", "transformer_2"):
        model = getattr(pipeline, part, None)
        if model is not None:
            adaptable(model)
    if not hasattr(pipeline, "load_lora_weights"):
        pipeline.__class__ = lora_pipeline_class(type(pipeline))
    return pipeline


def adaptable(model: nn.Module) -> nn.Module:
    """Return the model, with `add_adapter`; Transformers' have one of their own."""
    if not isinstance(model, PeftAdapterMixin | PreTrainedModel):
        model.__class__ = _composed(type(model), PeftAdapterMixin)
    return model


def lora_pipeline_class(pipeline_class: type) -> Any:
    """Return the class if it loads LoRA weights, else one that adds it."""
    if hasattr(pipeline_class, "save_lora_weights"):
        return pipeline_class
    # This is the one of Diffusers' LoRA mixins that knows only of `transformer`.
    return _composed(pipeline_class, CogVideoXLoraLoaderMixin)


def _composed(base: type, mixin: type) -> type:
    # save_pretrained writes the class's name, so the composed class keeps it.
    members = {"__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base, mixin), members)
