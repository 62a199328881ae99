"""The loss of `train.target: guided`, for checkpoints that guidance was distilled into.

Such a model predicts u + s (c - u), where c is what a caption gives, u what an empty caption gives, and s the
guidance. Trained on data alone it would learn c, and its samples would need guidance again. So the base's u is taken
for each sample, and not the output but (output - u) / s + u is compared with the data. That is the squared error from
the target u + s (data - u), divided by s squared, for every kind of prediction, and comparable with other losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

OutputRows = list[list[torch.Tensor]]
"""For each output of a model, such as video and sound, the tensors of its samples in order, each without batch."""


@contextmanager
def record_model_outputs(model: nn.Module, rows: OutputRows) -> Iterator[None]:
    """Add the floating-point outputs of all calls of the model inside the context to `rows`."""

    def record(_module: nn.Module, _args: object, output: Any) -> None:
        for number, tensors in enumerate(_list_output_samples(output)):
            # The first call shows how many outputs the model has.
            if number == len(rows):
                rows.append([])
            rows[number] += tensors

    with model.register_forward_hook(record):
        yield


@contextmanager
def remove_guidance(model: nn.Module, base: OutputRows, scales: torch.Tensor) -> Iterator[None]:
    """Let the model's calls inside the context return outputs without guidance, in fp32.

    Args:
        model: The model.
        base: The base's outputs for the empty caption. The calls inside the context must have the same samples in the
            same order, but may divide them differently.
        scales: The guidance of each sample, fp32 (samples,); 1 leaves its output as it is.
    """
    position = 0

    def convert(_module: nn.Module, _args: object, output: Any) -> Any:
        nonlocal position
        leaves, structure = tree_flatten(output)
        # Timesteps and masks, if a model returns them, have no guidance.
        indices = [index for index, leaf in enumerate(leaves) if _is_float_tensor(leaf)]
        rows = _list_output_samples(output)
        stop = position + len(rows[0])
        # Row by row: the recorded calls may have been divided differently.
        removed = [
            [
                _remove_guidance_from_output(row, base_row, scale)
                for row, base_row, scale in zip(
                    tensors, base[number][position:stop], scales[position:stop], strict=True
                )
            ]
            for number, tensors in enumerate(rows)
        ]
        position = stop
        # A list has a leaf for each sample, a batch has one for all.
        replaced = removed[0] if _is_sample_list(output) else [torch.stack(tensors) for tensors in removed]
        for index, tensor in zip(indices, replaced, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, structure)

    with model.register_forward_hook(convert):
        yield


def _remove_guidance_from_output(output: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # In bf16 the division would lose what a small scale leaves of the difference.
    output, base = output.float(), base.float()
    if len(output) != len(base):
        # Qwen-Image 2.1 returns tokens of the text, whose number differs, before those of the image.
        num_common = min(len(output), len(base))
        text, image = output[:-num_common], output[-num_common:]
        return torch.cat([text, _remove_guidance_from_output(image, base[-num_common:], scale)])
    return base + (output - base) / scale


def _list_output_samples(output: Any) -> OutputRows:
    """The samples of each floating-point output of one call."""
    tensors = [leaf for leaf in tree_leaves(output) if _is_float_tensor(leaf)]
    if _is_sample_list(output):
        return [tensors]
    return [list(tensor.unbind(0)) for tensor in tensors]


def _is_float_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _is_sample_list(output: Any) -> bool:
    """True if a model returns a list with a tensor for each sample, as Z-Image's does; otherwise batches."""
    # With `return_dict=False` models return their output in a tuple.
    content = output[0] if isinstance(output, tuple) and output else output
    return isinstance(content, list)
