"""Load checkpoints without running code from them. A local folder is loaded without any access to the Hub.

Unless `trust_remote_code` is set, Transformers asks on standard input whether to run the code that a config names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dit_lora.config.remedies import get_hub_name
from dit_lora.environment.hub_kernels import read_configs_without_kernels
from dit_lora.errors import DitLoraError
from dit_lora.files import require_regular_files


def load_pretrained(model_class: Any, source: str | Path, **options: Any) -> Any:
    """Call `model_class.from_pretrained` with a folder, or with a name on the Hub given as text.

    Raises `DitLoraError` if loading needs code from the checkpoint or the Hub, if files are damaged, and for a folder
    that does not exist.
    """
    from diffusers import ModelMixin, ModularPipeline

    from dit_lora.environment.chat_templates import limit_chat_template_rendering

    # Before a tokenizer or processor of the checkpoint can render its template.
    limit_chat_template_rendering()
    name, folder = None, Path(source).expanduser()
    if not folder.is_dir():
        name = get_hub_name(source) if isinstance(source, str) else None
        if name is None:
            raise DitLoraError(f"the folder {source} does not exist")
    else:
        require_regular_files(folder)
    if issubclass(model_class, ModularPipeline):
        if name is not None:
            raise DitLoraError(f"{name}: a modular pipeline is loaded from a folder; download it first")
        return _load_modular_pipeline(model_class, folder, **options)
    # Diffusers' models never run code of a checkpoint, and do not accept this option.
    if not issubclass(model_class, ModelMixin):
        options["trust_remote_code"] = False
    # Errors name the folder that is read, not only the checkpoint.
    part = options.get("subfolder")
    with _translate_load_errors(folder / part if part else folder, model_class):
        # For a local folder, a missing file must not lead to a request to the Hub.
        return model_class.from_pretrained(name or folder, local_files_only=name is None, **options)


def _load_modular_pipeline(
    pipeline_class: Any,
    folder: Path,
    *,
    blocks: Any = None,
    dtype: Any = None,
    use_safetensors: bool = True,
    **components: Any,
) -> Any:
    """Load a `ModularPipeline` with every component that its blocks need, each from its folder in the checkpoint.

    Diffusers' own `load_components` reads from the index which class each component has and which repository it is in,
    and only warns about a component that cannot be loaded. Here the index is not read.

    Args:
        pipeline_class: A subclass of `ModularPipeline`.
        folder: The checkpoint's folder, with a folder for each component.
        blocks: The blocks to run; None for all blocks of the class.
        dtype: Dtype of the weights, or dtypes by component with one for the others under "default".
        use_safetensors: Must be true: weights in other formats are not read.
        components: Components to use in place of the stored ones; None leaves a component out.
    """
    from torch.nn import Module

    if not use_safetensors:
        raise DitLoraError(f"{folder}: weights are read from .safetensors files only")
    # Without a path the pipeline reads no index, and has only components without files, such as the guider.
    pipeline = pipeline_class(blocks=blocks)
    loaded = {name: component for name, component in components.items() if component is not None}
    # A component may be left out that the blocks do not have, but not given.
    unknown = sorted(loaded.keys() - set(pipeline.component_names))
    if unknown:
        raise DitLoraError(f"{pipeline_class.__name__}: its blocks have no component {', '.join(unknown)}")
    for name in pipeline.pretrained_component_names:
        # A component that is given or left out needs no files.
        if name in components:
            continue
        if not (folder / name).is_dir():
            raise DitLoraError(
                f"{folder} has no folder {name}: put that component's files there, which its index may place in "
                "another repository"
            )
        # The class that the blocks name. An index could name any class of any package.
        component_class = pipeline.get_component_spec(name).type_hint
        # Tokenizers and schedulers have no weights, and would store these options.
        options: dict[str, Any] = {"use_safetensors": True} if issubclass(component_class, Module) else {}
        if options and dtype is not None:
            options["dtype"] = dtype.get(name, dtype["default"]) if isinstance(dtype, dict) else dtype
        loaded[name] = load_pretrained(component_class, folder, subfolder=name, **options)
    # In one call, which also brings the pipeline's list of its components up to date.
    pipeline.update_components(**loaded)
    return pipeline


def build_from_config(model_class: Any, config: Any, **options: Any) -> Any:
    """Call `model_class.from_config` of an Auto class with a config. Raises the same errors as `load_pretrained`."""
    with _translate_load_errors(Path(config.name_or_path), model_class):
        return model_class.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _translate_load_errors(source: Path, model_class: Any) -> Iterator[None]:
    """Turn the libraries' errors for a damaged checkpoint into a `DitLoraError`, and download no kernels meanwhile.

    Transformers, Diffusers and tokenizers pass values from a checkpoint's files to constructors unchecked, so a wrong
    value can raise anything, even the plain `Exception` of tokenizers.
    """
    from torch import OutOfMemoryError

    try:
        with read_configs_without_kernels():
            yield
    # These say more than that the checkpoint is damaged.
    except (DitLoraError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        # Transformers' message for a checkpoint that needs its own code.
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise DitLoraError(
                f"{source} needs its own code, which dit-lora never runs; give a checkpoint for Diffusers or "
                "Transformers without auto_map and Python files"
            ) from error
        # One line: errors of Transformers span several.
        message = " ".join(str(error).split())[:400] or "no reason given"
        raise DitLoraError(
            f"cannot load {source} as {model_class.__name__}; its files may be damaged or of another version: "
            f"{type(error).__name__}: {message}"
        ) from error
