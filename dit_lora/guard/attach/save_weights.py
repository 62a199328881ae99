"""Write the trained weights to disk when the guard stops a loop."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dit_lora.files import write_atomically
from dit_lora.numerics.dtensors import gather_tensors


def save_trained_weights(weights: Mapping[str, torch.Tensor], folder: Path, step: int, *, is_main: bool) -> str:
    """Write trained weights to a safetensors file and return a message with its path. Collective for sharded weights.

    If the disk cannot be written or safetensors is missing, the message says so, and the reason for the stop is still
    reported.
    """
    # All ranks gather before one of them returns: the call is collective.
    full_weights = gather_tensors(weights, keep_values=is_main)
    path = folder / f"last_good_step_{step:06d}.safetensors"
    if not is_main:
        return ""
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in full_weights.items()}
    try:
        from safetensors.torch import save
    except ImportError:
        return "they are not written to disk, because safetensors is not installed"
    try:
        write_atomically(path, save(tensors, metadata={"format": "pt", "step": str(step)}))
    except OSError as error:
        return f"they could not be written to {path}: {error.strerror}"
    return f"they are in {path} (model.load_state_dict(load_file(path), strict=False))"
