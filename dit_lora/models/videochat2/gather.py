"""Collects the tensors of the released files and the language model's folder by our names, without reading them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from dit_lora.config.records import WeightMap, read_typed_json
from dit_lora.environment.safetensors_files import open_safetensors, read_header
from dit_lora.errors import DitLoraError, format_list
from dit_lora.models.videochat2.released import (
    ReleasedWeightsFile,
    map_language_model_name,
    map_tensor_name,
    read_released_weights,
    unused_reason,
)

# Transformers' file names: an index if there are several shards, else one file.
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_PICKLED_INDEX, _PICKLED_WEIGHTS = "pytorch_model.bin.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class TensorOnDisk:
    """A tensor in a file, with its shape; `read` loads the values."""

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass
class TensorSources:
    """Files that each tensor of the converted model comes from. Later files override earlier ones."""

    # By our name.
    weights: dict[str, TensorOnDisk] = field(default_factory=dict)
    lora: dict[str, dict[str, TensorOnDisk]] = field(default_factory=dict)
    """LoRA matrices by our layer name: `A` (rank, inputs) and `B` (outputs, rank)."""
    unused: dict[str, list[str]] = field(default_factory=dict)
    """Reasons to the names of released tensors that are not needed."""
    unknown: list[str] = field(default_factory=list)


def collect_tensor_sources(
    llm: Path, files: Sequence[ReleasedWeightsFile], *, blocks: int, use_text: bool
) -> TensorSources:
    """Collect the tensors of the language model's folder, overridden by those of the files in their order.

    `blocks` and `use_text` are those of `unused_reason`. Raises `DitLoraError` if a file cannot be read.
    """
    sources = TensorSources()
    for name, stored in _iter_language_model_weights(llm):
        if reason := unused_reason(name, blocks=blocks, use_text=use_text):
            sources.unused.setdefault(reason, []).append(f"{stored.file.name}: {name}")
        else:
            sources.weights[map_language_model_name(name)] = stored
    # In the order of the stages: a tensor of a later file replaces that of an earlier one.
    for file in files:
        for key in file.other_entries:
            reason = "of a training run, beside its `model`"
            sources.unused.setdefault(reason, []).append(f"{file.path.name}: {key}")
        for name, tensor in file.tensors.items():
            reason = unused_reason(name, blocks=blocks, use_text=use_text)
            if reason:
                sources.unused.setdefault(reason, []).append(f"{file.path.name}: {name}")
                continue
            # detach reads nothing: the values stay on disk until they are used.
            target, stored = map_tensor_name(name), TensorOnDisk(file.path, tuple(tensor.shape), tensor.detach)
            if target is None:
                sources.unknown.append(f"{file.path.name}: {name}")
            elif target.part == "weight":
                sources.weights[target.name] = stored
            else:
                sources.lora.setdefault(target.name, {})[target.part] = stored
    return sources


def _iter_language_model_weights(llm: Path) -> Iterator[tuple[str, TensorOnDisk]]:
    """Yield names and tensors of a Transformers folder: safetensors or, for old Vicunas, .bin files."""
    # Prefer safetensors, and read .bin files only if there are none.
    for index, weights, entries in (
        (_INDEX, _WEIGHTS, _iter_safetensors),
        (_PICKLED_INDEX, _PICKLED_WEIGHTS, _iter_pickled),
    ):
        names = [weights]
        if (llm / index).is_file():
            weight_map = read_typed_json(llm / index, WeightMap)["weight_map"]
            # Each shard once, in the order of the index.
            names = list(dict.fromkeys(weight_map.values()))
        elif not (llm / weights).is_file():
            continue
        missing = [str(llm / name) for name in names if not (llm / name).is_file()]
        if missing:
            raise DitLoraError(format_list(f"{llm / index} lists files that do not exist:", missing))
        for name in names:
            yield from entries(llm / name)
        return
    raise DitLoraError(
        f"{llm} has no weights; looked for {_INDEX}, {_WEIGHTS}, {_PICKLED_INDEX} and {_PICKLED_WEIGHTS}"
    )


def _iter_safetensors(file: Path) -> Iterator[tuple[str, TensorOnDisk]]:
    """Yield the tensors of a safetensors file. Raises `DitLoraError` if it is incomplete."""

    def read(name: str) -> torch.Tensor:
        # Open the file at each read, so that no file stays open for hundreds of tensors.
        with open_safetensors(file) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    # Only the header is read here; each tensor is read when it is written.
    for name, tensor in read_header(file).tensors.items():
        yield name, TensorOnDisk(file, tensor.shape, partial(read, name))


def _iter_pickled(file: Path) -> Iterator[tuple[str, TensorOnDisk]]:
    for name, tensor in read_released_weights(file).tensors.items():
        yield name, TensorOnDisk(file, tuple(tensor.shape), tensor.detach)


def check_tensor_sources(sources: TensorSources, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise one `DitLoraError` that lists every unknown or missing tensor, and every tensor of another shape."""
    problems = [f"{name}: unknown" for name in sources.unknown]
    # Tensors that the model lacks, or that have another shape.
    for name, stored in sources.weights.items():
        shape = expected.get(name)
        if shape is None:
            problems.append(f"{stored.file.name}: {name}: not of this model")
        elif shape != stored.shape:
            problems.append(f"{stored.file.name}: {name}: shape {stored.shape}, the config makes {shape}")
    problems += [f"{name}: missing from every file" for name in expected if name not in sources.weights]
    for module, lora in sources.lora.items():
        problems += _lora_errors(module, lora, expected.get(f"{module}.weight"))
    if problems:
        raise DitLoraError(format_list("these files do not make a VideoChat2 of this config:", problems))


def _lora_errors(module: str, lora: Mapping[str, TensorOnDisk], shape: tuple[int, ...] | None) -> list[str]:
    if shape is None:
        return [f"LoRA of {module}: the model has no such layer"]
    # A and B must both be there.
    if len(lora) < 2:
        return [f"LoRA of {module}: {next(iter(lora))} without its other half"]
    # A is (rank, inputs), B is (outputs, rank).
    a, b = lora["A"].shape, lora["B"].shape
    # B A must have the weight's shape, and both matrices the same rank.
    if (b[:1] + a[1:], a[:1]) != (shape, b[1:]):
        return [f"LoRA of {module}: A {a}, B {b} for a weight of {shape}"]
    return []
