"""Find which tensors of a model call have a row for each sample, and cut single samples out of the call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dit_lora.guard.attach.samples.tensors import has_batch_size, iter_tensors, map_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Transformers' argument names for images and videos whose patches are packed into one tensor, with the grid that says
# which patches belong to which image.
_PATCH_ARGUMENTS = (
    ("pixel_values", "image_grid_thw", "image_token_id", 1),
    ("pixel_values_videos", "video_grid_thw", "video_token_id", 2),
)
_BATCH_FIRST_NAMES = ("input_ids", "inputs_embeds", "hidden_states")


def collect_named_tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    """Every tensor argument of a model call, by name: `argument 0`, `argument 1['mask']`, `hidden_states`."""
    named = _name_arguments(arguments).items()
    return {path: tensor for name, value in named for path, tensor in iter_tensors(value, name)}


def _name_arguments(arguments: Arguments) -> dict[str, Any]:
    args, kwargs = arguments
    return {f"argument {number}": value for number, value in enumerate(args)} | kwargs


def count_samples(arguments: Arguments) -> int:
    """Number of samples in a model call: rows of its text or hidden states, else of the first argument that has rows.

    A list of tensors, as Z-Image takes, has one element per sample.
    """
    args, kwargs = arguments
    for name in _BATCH_FIRST_NAMES:
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    for value in (*args, *kwargs.values()):
        if is_tensor_list(value):
            return len(value)
        count = next((len(tensor) for _, tensor in iter_tensors(value) if tensor.ndim), None)
        if count is not None:
            return count
    return 1


def is_tensor_list(value: Any) -> bool:
    """True for a list of tensors; a tuple, such as a pair of rotary tables, is one value for all samples."""
    return type(value) is list and bool(value) and all(torch.is_tensor(tensor) for tensor in value)


@dataclass(frozen=True)
class SamplePart:
    """The part of one call argument that belongs to one sample: a row of a tensor, or an element of a list."""

    path: str
    values: torch.Tensor
    row: int | None
    """The sample's number in the call; None where the argument has no part for each sample."""
    num_parts: int


def iter_sample_parts(arguments: Arguments) -> Iterator[list[SamplePart]]:
    """Yield for each floating-point argument of a call its parts: one per sample if it is split by sample."""
    count = count_samples(arguments)
    for name, value in _name_arguments(arguments).items():
        if _is_list_of_samples(value, count):
            yield [SamplePart(name, element, row, count) for row, element in enumerate(value)]
            continue
        for path, tensor in iter_tensors(value, name):
            if not tensor.is_floating_point():
                continue
            if has_batch_size(tensor, count):
                yield [SamplePart(path, tensor[row], row, count) for row in range(count)]
            elif tensor.ndim and tensor.layout is torch.strided:
                yield [SamplePart(path, element, None, len(tensor)) for element in tensor]
            else:
                yield [SamplePart(path, tensor, None, 1)]


def _is_list_of_samples(value: Any, count: int) -> bool:
    """True for a list with one tensor per sample; False for batches, such as the hidden states of several layers."""
    return is_tensor_list(value) and len(value) == count and not all(has_batch_size(tensor, count) for tensor in value)


@dataclass(frozen=True)
class SampleExtractor:
    """Extracts one sample from a model call's arguments and outputs."""

    count: int
    patches: Mapping[str, tuple[tuple[int, int], ...]]
    """Start and end of each sample's part, by keyword argument, for packed patches and their grids."""

    def extract_sample_arguments(self, arguments: Arguments, row: int) -> Arguments:
        """Arguments of a model call with only one sample. Values that are not split by sample stay unchanged."""
        args, kwargs = arguments
        parts = {}
        for name, value in kwargs.items():
            if name in self.patches:
                start, end = self.patches[name][row]
                parts[name] = value[start:end]
            else:
                parts[name] = self.extract_sample_value(value, row)
        return tuple(self.extract_sample_value(value, row) for value in args), parts

    def extract_sample_value(self, value: Any, row: int) -> Any:
        def select_tensor_row(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[row : row + 1] if has_batch_size(tensor, self.count) else tensor

        if _is_list_of_samples(value, self.count):
            return value[row : row + 1]
        return map_tensors(select_tensor_row, value)

    def replace_row(self, arguments: Arguments, row: int, source: int) -> Arguments | None:
        """Copy the arguments with sample `row` replaced by sample `source`; None if the samples differ in size."""
        # The samples may have different numbers of packed patches.
        if self.patches:
            return None
        args, kwargs = arguments

        def replace_value_row(value: Any) -> Any:
            if _is_list_of_samples(value, self.count):
                return [value[source] if n == row else element for n, element in enumerate(value)]
            return map_tensors(copy_row, value)

        def copy_row(tensor: torch.Tensor) -> torch.Tensor:
            if not has_batch_size(tensor, self.count):
                return tensor
            changed = tensor.clone()
            changed[row] = tensor[source]
            return changed

        return (
            tuple(replace_value_row(value) for value in args),
            {name: replace_value_row(value) for name, value in kwargs.items()},
        )

    def extract_sample_outputs(self, outputs: Sequence[Any], row: int) -> tuple[Any, ...]:
        """One sample's part of a model's outputs, or of the gradients of these outputs."""
        # One output tensor per sample.
        if len(outputs) == self.count > 1:
            return tuple(outputs[row : row + 1])
        return tuple(self.extract_sample_value(value, row) for value in outputs)


def make_sample_extractor(arguments: Arguments, config: Any) -> SampleExtractor | None:
    """Create an object that extracts single samples from a model call; None if that is impossible.

    It is impossible if the packed patches of several samples cannot be told apart.

    Args:
        arguments: Positional and keyword arguments of the call.
        config: The model's configuration, which names the tokens that stand for image patches; None if it has none.
    """
    _, kwargs = arguments
    count = count_samples(arguments)
    bounds: dict[str, tuple[tuple[int, int], ...]] = {}
    for values_name, grid_name, token_name, token_type in _PATCH_ARGUMENTS:
        values, grid = kwargs.get(values_name), kwargs.get(grid_name)
        if not isinstance(values, torch.Tensor):
            continue
        if not isinstance(grid, torch.Tensor):
            if has_batch_size(values, count):
                continue
            return None
        tokens = _count_patch_tokens(kwargs, getattr(config, token_name, None), token_type)
        parts = _split_patches_by_sample(grid, tokens) if tokens is not None else None
        # All packed patches have to be accounted for by the grid.
        if parts is None or int(grid.prod(1).sum()) != len(values):
            return None
        images, patches = parts
        bounds[grid_name], bounds[values_name] = images, patches
    return SampleExtractor(count, bounds)


def _count_patch_tokens(kwargs: Mapping[str, Any], token: Any, token_type: int) -> list[int] | None:
    """Number of tokens of each sample that stand for image patches. None if the call has no ids or token types."""
    ids, types = kwargs.get("input_ids"), kwargs.get("mm_token_type_ids")
    if isinstance(token, int) and isinstance(ids, torch.Tensor) and ids.ndim == 2:
        # (B, L) -> B counts.
        return (ids == token).sum(1).tolist()
    if isinstance(types, torch.Tensor) and types.ndim == 2:
        # (B, L) -> B counts; 1 stands for images and 2 for videos.
        return (types == token_type).sum(1).tolist()
    return None


def _split_patches_by_sample(
    grid: torch.Tensor, tokens: list[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] | None:
    """Start and end of each sample's images, and of their patches; None if tokens and grids do not add up.

    Args:
        grid: Patches in time, height and width of each image, (P, 3).
        tokens: Tokens that stand for patches in each sample; several patches are merged into one token.
    """
    # (P, 3) -> P numbers: time x height x width patches of each image.
    sizes = grid.prod(1).tolist()
    if not sizes or not sum(tokens) or sum(sizes) % sum(tokens):
        return None
    # Patches that are merged into one token, such as 2 x 2.
    merged = sum(sizes) // sum(tokens)
    images: list[tuple[int, int]] = []
    patches: list[tuple[int, int]] = []
    image = patch = 0
    for num_tokens in tokens:
        first_image, first_patch, num_patches = image, patch, 0
        while num_patches < num_tokens * merged and image < len(sizes):
            num_patches += sizes[image]
            patch += sizes[image]
            image += 1
        # An image would belong to two samples, so the counts do not fit.
        if num_patches != num_tokens * merged:
            return None
        images.append((first_image, image))
        patches.append((first_patch, patch))
    return (tuple(images), tuple(patches)) if image == len(sizes) else None
