"""LoRA for Diffusers' models and pipelines without a LoRA loader (DiT, Latte, PixArt), or without its save (Anima).

Diffusers' mixins need only a class's modules, so an object's class is replaced by a subclass that has the mixins. Its
name, config and weights stay the same, and so do the files that `save_pretrained` writes.
"""

from typing import Any, TypeVar

import torch
from diffusers.loaders import CogVideoXLoraLoaderMixin, FluxLoraLoaderMixin, PeftAdapterMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from torch import nn
from transformers import PreTrainedModel

from dit_lora.numerics.quantized_linear import QuantizedLinear

Pipeline = TypeVar("Pipeline", bound=Any)


def with_lora(pipeline: Pipeline) -> Pipeline:
    """Give the pipeline `load_lora_weights`, `set_adapters`, `unload_lora_weights` and the other LoRA methods, in
    place.

    Does nothing if the pipeline has them. Returns the pipeline.
    """
    for part in ("transformer", "transformer_2"):
        model = getattr(pipeline, part, None)
        if model is not None:
            add_adapter_methods(model)
    # Changing the class of the object keeps all references to it valid.
    if not hasattr(pipeline, "load_lora_weights"):
        pipeline.__class__ = get_lora_pipeline_class(type(pipeline))
    return pipeline


def add_adapter_methods(model: nn.Module) -> nn.Module:
    """Give a model the method `add_adapter`, in place, and return it. Models of Transformers have it already."""
    if not isinstance(model, PeftAdapterMixin | PreTrainedModel):
        model.__class__ = _create_pipeline_subclass(type(model), PeftAdapterMixin)
    return model


def get_lora_pipeline_class(pipeline_class: type) -> Any:
    """The pipeline class itself if it can load and save LoRA weights, else a subclass that can."""
    # Anima's mixin loads them, but only inherits the method to save them, which raises NotImplementedError.
    classes = (base for base in pipeline_class.__mro__ if base is not LoraBaseMixin)
    if any("save_lora_weights" in vars(base) for base in classes):
        return pipeline_class
    # This mixin of Diffusers loads into `transformer` only. A loader that the class has comes first in its MRO.
    return _create_pipeline_subclass(pipeline_class, CogVideoXLoraLoaderMixin)


def allow_quantized_layers(pipeline: Pipeline) -> Pipeline:
    """Let a pipeline load LoRA into `QuantizedLinear` layers too, in place, and return it.

    FLUX.1's loader compares the shape of each weight with the file's, and would replace a layer whose codes have
    another shape with a wider one. It handles bitsandbytes' layers, but not these.
    """
    if isinstance(pipeline, FluxLoraLoaderMixin):
        shapes = {"_calculate_module_shape": staticmethod(_get_module_shape)}
        pipeline.__class__ = _create_pipeline_subclass(type(pipeline), **shapes)
    return pipeline


def _get_module_shape(
    model: nn.Module, base_module: nn.Linear | None = None, base_weight_param_name: str | None = None
) -> torch.Size:
    module: Any = base_module
    if base_weight_param_name is not None:
        module = model.get_submodule(base_weight_param_name.removesuffix(".weight"))
    if isinstance(module, QuantizedLinear):
        return torch.Size((module.out_features, module.in_features))
    return FluxLoraLoaderMixin._calculate_module_shape(model, base_module=module)


def _create_pipeline_subclass(base: type, *mixins: type, **members: Any) -> type:
    # save_pretrained writes the name of the class, so the new class keeps it.
    members |= {"__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base, *mixins), members)
