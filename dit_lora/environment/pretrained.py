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
from dit_lora.files import require_regular


def load_pretrained(model_class: Any, source: str | Path, **options: Any) -> Any:
    """Call `model_class.from_pretrained` with a folder, or with a name on the Hub given as text.

    Raises `DitLoraError` if loading needs code from the checkpoint or the Hub, if files are damaged, and for a folder
    that does not exist.
    """
    from diffusers import ModelMixin, ModularPipeline

    from dit_lora.environment.chat_templates import limit_chat_templates

    # Before a tokenizer or processor of the checkpoint can render its template.
    limit_chat_templates()
    name, folder = None, Path(source).expanduser()
    if not folder.is_dir():
        name = get_hub_name(source) if isinstance(source, str) else None
        if name is None:
            raise DitLoraError(f"the folder {source} does not exist")
    else:
        require_regular(folder)
    if issubclass(model_class, ModularPipeline):
        # Import here: it loads the components with this function.
        from dit_lora.environment.modular_pipelines import load_modular_pipeline

        if name is not None:
            raise DitLoraError(f"{name}: a modular pipeline is loaded from a folder; download it first")
        return load_modular_pipeline(model_class, folder, **options)
    # Diffusers' models never run code of a checkpoint, and do not accept this option.
    if not issubclass(model_class, ModelMixin):
        options["trust_remote_code"] = False
    # Errors name the folder that is read, not only the checkpoint.
    part = options.get("subfolder")
    with _translate_load_errors(folder / part if part else folder, model_class):
        # For a local folder, a missing file must not lead to a request to the Hub.
        return model_class.from_pretrained(name or folder, local_files_only=name is None, **options)


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
