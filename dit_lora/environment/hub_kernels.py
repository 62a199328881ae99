"""Keep Transformers, Diffusers and bitsandbytes from downloading kernels, which are code, from the Hub.

The package `kernels` downloads and runs a repository's code. If it is installed, Transformers calls it for names in a
config: an attention or experts implementation, a quantization method, or an architecture with its own kernels. Two
measures prevent that. Configs are read without the keys that name kernels, and while a checkpoint is loaded the
package looks as if it were not installed.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

from dit_lora.errors import DitLoraError

_PACKAGE = "kernels"
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_EXPERTS_KEYS = ("experts_implementation", "_experts_implementation", "_experts_implementation_internal")
# Implementations of Transformers that need no other package. Any other is replaced with Transformers' default:
# published checkpoints that name flash attention also run without it.
_BUILTIN_IMPLEMENTATIONS = {
    **dict.fromkeys(_ATTENTION_KEYS, ("eager", "sdpa")),
    **dict.fromkeys(_EXPERTS_KEYS, ("eager", "batched_mm", "grouped_mm")),
    "use_kernels": (False,),
    "kernel_config": (),
}
# Methods that download nothing; fp8, mxfp4, nvfp4, eetq, gguf, metal and nunchaku_lite get their kernels from the Hub.
_ALLOWED_QUANTIZATIONS = (
    *("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
    *("aqlm", "awq", "compressed-tensors", "gptq", "hqq", "quanto", "torchao"),
)

# Far above any published model.
MAX_LAYERS = 10_000
# Keys such as num_hidden_layers and depth, for which Transformers builds lists.
_LAYER_COUNT_KEY = re.compile("layers|blocks|depth")


def remove_kernels(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Copy a config without the values, at every level, for which Transformers would download a kernel.

    Raises `DitLoraError` if the config names a Hub repository as its attention or a quantization method that downloads
    kernels, and for numbers of layers so large that Transformers would build lists for hours.
    """
    cleaned: dict[str, Any] = {}
    for key, value in config.items():
        # The key is left out of the copy, so that the default applies.
        if key in _BUILTIN_IMPLEMENTATIONS and value is not None and value not in _BUILTIN_IMPLEMENTATIONS[key]:
            names = value.values() if isinstance(value, dict) else [value]
            # OWNER/NAME is a repository. One value may name an implementation for each sub-model.
            if any("/" in str(name) for name in names):
                raise DitLoraError(
                    f"{source}: {key} {value!r} is code from the Hub, which dit-lora never runs; remove it"
                )
            continue
        if key == "quantization_config" and value is not None:
            _require_allowed_quantization(value, source)
        if isinstance(value, int) and _LAYER_COUNT_KEY.search(key) and value > MAX_LAYERS:
            raise DitLoraError(f"{source}: {key} is {value:,}, more than {MAX_LAYERS:,}")
        # Configs of sub-models are nested.
        if isinstance(value, dict):
            value = remove_kernels(value, source)
        elif isinstance(value, list):
            value = [remove_kernels(v, source) if isinstance(v, dict) else v for v in value]
        cleaned[key] = value
    return cleaned


def _require_allowed_quantization(value: Any, source: str) -> None:
    # Older bitsandbytes configs have flags and no method.
    method = value.get("quant_method") if isinstance(value, dict) else value
    if isinstance(value, dict) and method is None and {"load_in_4bit", "load_in_8bit"} & {*value}:
        method = "bitsandbytes"
    if method not in _ALLOWED_QUANTIZATIONS:
        raise DitLoraError(
            f"{source}: quantization method {method!r} is not supported, because it may fetch kernels from the Hub; "
            f"give a checkpoint in full precision, or quantized with {', '.join(_ALLOWED_QUANTIZATIONS)}"
        )


@contextmanager
def hide_kernels_package() -> Iterator[None]:
    """Make the package `kernels` look as if it were not installed, inside the context."""
    modules = cast(dict[str, ModuleType | None], sys.modules)
    # Empty if it was not imported: then the entry is deleted again afterwards.
    before = {_PACKAGE: modules[_PACKAGE]} if _PACKAGE in modules else {}
    transformers: Any = modules.get("transformers.integrations.hub_kernels")
    # Transformers' own test for the package is replaced too.
    is_available = getattr(transformers, "is_kernels_available", None)
    modules[_PACKAGE] = None  # makes `import kernels` raise ModuleNotFoundError
    if is_available is not None:
        transformers.is_kernels_available = lambda: False
    try:
        yield
    finally:
        del modules[_PACKAGE]
        modules.update(before)
        if is_available is not None:
            transformers.is_kernels_available = is_available


@contextmanager
def read_configs_without_kernels() -> Iterator[None]:
    """Read all configs of Transformers and Diffusers through `remove_kernels` inside the context; fetch no kernels.

    The two methods that are replaced here read every config: those that `configuration_files` names, and those of a
    pipeline's components.
    """
    from diffusers import ConfigMixin
    from transformers import PreTrainedConfig

    # From `vars`: the classmethod objects themselves, so that they can be put back unchanged.
    read, load = vars(PreTrainedConfig)["get_config_dict"], vars(ConfigMixin)["load_config"]

    def get_config_dict(cls: Any, *args: Any, **options: Any) -> tuple[dict[str, Any], Any]:
        # `__func__`, with the class that it was called on: a subclass may have its own attributes.
        config, unused = read.__func__(cls, *args, **options)
        source = args[0] if args else options.get("pretrained_model_name_or_path")
        return remove_kernels(config, f"config.json of {source}"), unused

    def load_config(cls: Any, *args: Any, **options: Any) -> Any:
        # A dict, or a tuple that begins with it, depending on the options.
        loaded = load.__func__(cls, *args, **options)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        quantization = config.get("quantization_config") if isinstance(config, dict) else None
        if quantization is not None:
            _require_allowed_quantization(quantization, f"the config of a {cls.__name__}")
        return loaded

    replaced: Any = PreTrainedConfig
    replaced.get_config_dict = classmethod(get_config_dict)
    mixin: Any = ConfigMixin
    mixin.load_config = classmethod(load_config)
    try:
        with hide_kernels_package():
            yield
    finally:
        replaced.get_config_dict, mixin.load_config = read, load
