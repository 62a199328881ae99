"""Merges a chat model's adapter into its checkpoint: the result needs no PEFT."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from dit_lora.adapters.attach import ADAPTER_NAME, find_tied_layers
from dit_lora.adapters.changed_weight import get_weight_changes
from dit_lora.adapters.diffusers_format import RUN_METADATA_FILE, read_run_metadata
from dit_lora.adapters.own_files import copy_checkpoint_files, require_valid_json
from dit_lora.adapters.peft_format import find_chat_adapter_file, load_chat_adapter
from dit_lora.config.records import read_typed_json
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.environment.safetensors_files import FLOAT_DTYPES, read_header
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.files import write_folder_atomically, write_json

# Integer tensors, such as position ids, are not merged and do not decide the dtype.
_INTEGER_DTYPES = {"I64", "I32", "I16", "I8", "U8", "BOOL"}
# Maximum size of one weight file, as `save_pretrained` takes it.
_MAX_SHARD_SIZE = "5GB"


def merge_adapter(
    adapter_dir: Path,
    base: Path,
    output_dir: Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the checkpoint `base` with the adapter of `adapter_dir` merged into it, for stock `from_pretrained`.

    An adapted layer's weight is computed in fp32 and rounded once to the base's dtype (the widest if it has several).
    Trained base weights replace those of the base. Tokenizer and processor files are copied. Transformers renames and
    joins stored weights when it loads them, and back when it saves, so the whole model is loaded on the CPU: memory
    for one copy in its dtype (14.5 GB for 7B in bf16), and for the largest layer three times in fp32.

    The folder is written under a temporary name and renamed.

    Args:
        adapter_dir: The adapter's folder.
        base: The base checkpoint's folder.
        output_dir: The folder to write.
        model_class: None for the Transformers class named in config.json.
        on_progress: Called with a line of text at each stage.

    Raises:
        DitLoraError: `output_dir` exists, the base is quantized, or the adapter does not fit.
        CheckFailedError: A merged weight is not finite.
    """
    if output_dir.exists():
        raise DitLoraError(f"{output_dir} already exists; choose another folder, or remove it")
    # Read the header before the long load, so that a wrong folder fails at once.
    provenance = read_run_metadata(find_chat_adapter_file(adapter_dir))
    require_valid_json(base)
    config = read_typed_json(base / "config.json", dict[str, Any])
    if "quantization_config" in config:
        raise DitLoraError(f"{base} is quantised; merge into the checkpoint that it was made from")
    if model_class is None:
        names = config.get("architectures") or ["none"]
        model_class = getattr(transformers, names[0], None)
        if model_class is None:
            raise DitLoraError(f"{base / 'config.json'}: Transformers has no class {names[0]}")
    dtype = _find_stored_dtype(base)
    on_progress(f"loading {base.name} in {str(dtype).removeprefix('torch.')}")
    model = load_pretrained(model_class, base, dtype=dtype, use_safetensors=True)
    load_chat_adapter(model, adapter_dir)
    on_progress(f"merging {_merge_layers(model)} layers")
    on_progress(f"writing {output_dir}")
    if model.can_generate():
        # Transformers reads some published generation configs and refuses to write them: the base's is copied below.
        model.generation_config = GenerationConfig.from_model_config(model.config)
    with write_folder_atomically(output_dir) as staged:
        model.save_pretrained(staged, max_shard_size=_MAX_SHARD_SIZE)
        # Transformers has written the config and the weights.
        copy_checkpoint_files(base, staged, lambda name: name != "config.json" and ".safetensors" not in name)
        write_json(staged / RUN_METADATA_FILE, provenance)
    return output_dir


@torch.no_grad()
def _merge_layers(model: PreTrainedModel) -> int:
    """Merge every layer's adapter into its weight and restore the plain layers. Returns the number of layers."""
    adapted = get_weight_changes(model, ADAPTER_NAME)
    # Merging into a shared weight would change the other module too.
    tied = find_tied_layers(model, adapted)
    if tied:
        raise DitLoraError(format_list("cannot merge into weights that two modules share", tied))
    for change in adapted.values():
        weight = change.layer.base_layer.weight.data
        # Add in place: new weights allocated between freed fp32 ones were measured to take 1.5 times the memory.
        weight.copy_(change.apply_to_weight(weight.float()))
    if adapted:
        # Removes PEFT's config from the model, so that `save_pretrained` writes a plain checkpoint.
        model.delete_adapter(ADAPTER_NAME)
    for name, change in adapted.items():
        model.set_submodule(name, change.layer.base_layer)
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    # Catches NaN and Inf, and in fp16 also sums that overflow.
    if bad:
        raise CheckFailedError(format_list(f"refused to write: not finite once merged in {model.dtype}", bad))
    return len(adapted)


def _find_stored_dtype(base: Path) -> torch.dtype:
    """Dtype of a checkpoint's floating-point weights; if there are several, one that holds all of them."""
    files = sorted(base.glob("model*.safetensors"))
    dtype_names = {tensor.dtype for file in files for tensor in read_header(file).tensors.values()}
    unknown = sorted(dtype_names - _INTEGER_DTYPES - FLOAT_DTYPES.keys())
    floating = [dtype for name, dtype in FLOAT_DTYPES.items() if name in dtype_names]
    if unknown or not floating:
        raise DitLoraError(
            f"{base} needs model*.safetensors in fp32, bf16 or fp16, to merge into; got {', '.join(unknown) or 'none'}"
        )
    # No half-precision type holds both bf16 and fp16; fp32 does.
    return functools.reduce(torch.promote_types, floating)
