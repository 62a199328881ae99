"""Write what a loop has trained to the disk, when the guard stops it."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dit_lora.files import write_whole
from dit_lora.numerics.dtensors import gathered


def save_trained(
    weights: Mapping[str, torch.Tensor], folder: Path, step: int, *, is_main: bool
) -> str:
    """Write trained weights to a safetensors file and say where; collective where weights are sharded.

    A disk that cannot be written, or want of the safetensors package, is said and does not hide why the run stopped.
    """
    # All ranks gather before one of them returns: the call is collective.
    whole = gathered(weights, keep=is_main)
    path = folder / f"last_good_step_{step:06d}.safetensors"
    if not is_main:
        return ""
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in whole.items()}
    try:
        from safetensors.torch import save
    except ImportError:
        return "they are not written to the disk, for which safetensors has to be installed"
    try:
        write_whole(path, save(tensors, metadata={"format": "pt", "step": str(step)}))
    except OSError as error:
        return f"they could not be written to {path}: {error.strerror}"
    return f"they are in {path} (model.load_state_dict(load_file(path), strict=False))"
