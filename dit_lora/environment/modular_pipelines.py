"""Load a `ModularPipeline` of Diffusers from a folder, without running code from it and without access to the Hub.

Diffusers' own `load_components` reads from the index which class each component has and which folder or repository
it is in, and only warns about a component that cannot be loaded. Here classes are those that the pipeline's blocks
name, files are those of the checkpoint's folder, and a component that cannot be loaded raises an error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError


def load_modular_pipeline(
    pipeline_class: Any,
    folder: Path,
    *,
    blocks: Any = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    use_safetensors: bool = True,
    **components: Any,
) -> Any:
    """Load a modular pipeline with every component that its blocks need.

    Args:
        pipeline_class: A subclass of `ModularPipeline`.
        folder: The checkpoint's folder, with a folder for each component.
        blocks: The blocks to run; None for all blocks of the class.
        dtype: Dtype of the weights, or dtypes by component with one for the others under "default".
        use_safetensors: Must be true: weights in other formats are not read.
        components: Components to use in place of the stored ones; None leaves a component out.

    Raises:
        DitLoraError: A component's folder is missing or damaged.
    """
    if not use_safetensors:
        raise DitLoraError(f"{folder}: weights are read from .safetensors files only")
    pipeline = pipeline_class(blocks=blocks)
    loaded = {name: part for name, part in components.items() if part is not None and name in pipeline.component_names}
    for name in pipeline.pretrained_component_names:
        if name in components:
            continue
        if not (folder / name).is_dir():
            raise DitLoraError(
                f"{folder} has no folder {name}: put that component's files there, which its index may place in "
                "another repository"
            )
        component_dtype = dtype.get(name, dtype["default"]) if isinstance(dtype, Mapping) else dtype
        loaded[name] = _load_component(pipeline.get_component_spec(name).type_hint, folder, name, component_dtype)
    pipeline.update_components(**loaded)
    return pipeline


def _load_component(component_class: Any, folder: Path, name: str, dtype: torch.dtype) -> Any:
    # Tokenizers and schedulers have no weights, and would store these options.
    is_model = issubclass(component_class, torch.nn.Module)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True} if is_model else {}
    return load_pretrained(component_class, folder, subfolder=name, **options)
