"""Reads a transformer's weights from a checkpoint on disk, by Diffusers' names, one tensor at a time."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dit_lora.adapters.lora_file import OF_CONVERTERS
from dit_lora.config.experts import EXPERTS
from dit_lora.config.records import read_typed
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Denoiser
from dit_lora.results.export.merge_pipeline import weight_files
from dit_lora.results.source import whole_pipeline
from dit_lora.results.tensor_file import FLOATS

# Prefixes of Diffusers' names in files of other programs.
_PREFIXES = ("", "transformer.", "model.diffusion_model.", "diffusion_model.")
_OF_HUB = ("*.json", "transformer*/*.safetensors")


@dataclass(frozen=True)
class CheckpointPlace:
    """Location of a checkpoint: a pipeline's folder, a transformer's folder, or a single file."""

    given: str
    path: Path
    is_pipeline: bool

    @property
    def has_two(self) -> bool:
        """True for a pipeline with two experts."""
        return self.is_pipeline and all((self.path / part).is_dir() for part in EXPERTS)

    @property
    def part(self) -> str:
        """The component that a checkpoint outside a pipeline is, judging by its name."""
        # Such as `transformer_2/`, `transformer_2.safetensors` or `model_low_noise.safetensors`.
        names = {self.path.name, self.path.stem.partition(".")[0]}
        for part, expert in EXPERTS.items():
            if part in names or self.path.stem.endswith(f"_{expert}"):
                return part
        return "transformer"

    def folder(self, part: str) -> Path:
        """Folder of the transformer's files."""
        return self.path / part if self.is_pipeline else self.path


def find_place(given: str) -> CheckpointPlace:
    """The checkpoint at a path, or the Hub pipeline of that name. Raises `DitLoraError` if there is none."""
    # A Hub name is downloaded here: only configs and the transformer's weights.
    path = result_folder(Path(given).expanduser(), _OF_HUB)
    pipeline = whole_pipeline(path)
    if pipeline is not None:
        return CheckpointPlace(given, pipeline, True)
    if path.is_file() or (path / "config.json").is_file():
        return CheckpointPlace(given, path, False)
    raise DitLoraError(
        f"{given} is no checkpoint; give a pipeline's folder (model_index.json), its transformer's (config.json), a "
        ".safetensors file, or a pipeline's name on the Hub"
    )


class StoredWeights:
    """The weights of one transformer, each read when used. A context manager.

    Diffusers converts a file with the published model's own names, as a whole. Its tensors stay on disk unless the
    conversion joins or permutes them.
    """

    def __init__(self, place: CheckpointPlace, checkpoint: Denoiser, model: nn.Module) -> None:
        """Open the checkpoint for a model of its architecture, whose values are not used.

        Raises:
            DitLoraError: Another architecture, or weights in less than half precision.
        """
        self._given, self._files = place.given, ExitStack()
        self._read: dict[str, Callable[[], torch.Tensor]] = {}
        self.shapes: dict[str, list[int]] = {}
        # What the architecture needs, by Diffusers' names.
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        try:
            self._open(place, checkpoint, expected)
        except (OSError, SafetensorError) as error:
            self._files.close()
            raise DitLoraError(f"{place.given} cannot be read: {error}; it is not whole") from error
        except DitLoraError:
            self._files.close()
            raise
        # All names and shapes are known here, and no tensor has been read.
        mismatches = [
            f"{name}: {self.shapes.get(name, 'not there')}, the model has {shape}"
            for name, shape in expected.items()
            if self.shapes.get(name) != shape
        ]
        if mismatches:
            self._files.close()
            summary = (
                f"{place.given} is of another model than {checkpoint.transformer_class.__name__} "
                f"of {checkpoint.path.name}"
            )
            raise DitLoraError(listed(summary, mismatches))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        return self._read[name]()

    def _open(
        self, place: CheckpointPlace, checkpoint: Denoiser, expected: Mapping[str, list[int]]
    ) -> None:
        """Find the names and shapes of all tensors."""
        if not place.path.is_file():
            folder = place.folder(checkpoint.part)
            _require_class(place.given, folder, checkpoint.transformer_class)
            for file in weight_files(folder):
                self._add(file, "")
            return
        if place.path.suffix != ".safetensors":
            raise DitLoraError(f"{place.given} is no .safetensors file; convert it first")
        # One file: find out which prefix its keys have. Each candidate must cover all of the model's tensors.
        with safe_open(place.path, framework="pt") as opened:
            names = set(opened.keys())
        for prefix in _PREFIXES:
            if {f"{prefix}{name}" for name in expected} <= names:
                self._add(place.path, prefix)
                return
        # No prefix fits: the names are those of the published model, not of Diffusers.
        self._convert(place, checkpoint)

    def _add(self, file: Path, prefix: str) -> None:
        """Add the tensors of a file whose names begin with this prefix."""
        # Stays open until the context ends, so that each tensor is read when it is asked for.
        opened = self._files.enter_context(safe_open(file, framework="pt"))
        unsupported = []
        for key in opened.keys():  # noqa: SIM118
            if not key.startswith(prefix):
                continue
            name, header = key.removeprefix(prefix), opened.get_slice(key)
            self._read[name] = partial(opened.get_tensor, key)
            self.shapes[name] = header.get_shape()
            # fp8 or packed integers: their difference would be that of rounded values.
            if header.get_dtype() not in FLOATS:
                unsupported.append(f"{name}: {header.get_dtype()}")
        if unsupported:
            raise _quantised(self._given, unsupported)

    def _convert(self, place: CheckpointPlace, checkpoint: Denoiser) -> None:
        """Add the tensors of a file with other names, converted by Diffusers' `from_single_file`."""
        read = getattr(checkpoint.transformer_class, "from_single_file", None)
        name = checkpoint.transformer_class.__name__
        if read is None:
            raise DitLoraError(
                f"{place.given} has other names than {name}, whose single files Diffusers does not read"
            )
        try:
            # `config` and `subfolder` point to local files, so that Diffusers downloads nothing.
            model = read(
                str(place.path),
                config=str(checkpoint.path),
                subfolder=checkpoint.part,
                local_files_only=True,
            )
        except OF_CONVERTERS as error:
            reason = str(error).strip().partition("\n")[0]
            raise DitLoraError(
                f"{place.given} is no {name} that Diffusers reads: {reason}"
            ) from error
        # Tensors of this model are views of the file where the conversion left them unchanged.
        tensors: Mapping[str, torch.Tensor] = model.state_dict()
        unsupported = [
            f"{tensor_name}: {value.dtype}"
            for tensor_name, value in tensors.items()
            if value.dtype not in FLOATS.values()
        ]
        if unsupported:
            raise _quantised(self._given, unsupported)
        for tensor_name, tensor in tensors.items():
            self._read[tensor_name] = tensor.detach
            self.shapes[tensor_name] = list(tensor.shape)


def _require_class(given: str, folder: Path, wanted: Any) -> None:
    """Raise `DitLoraError` for a folder with another model class, or a quantized model."""
    config = (
        read_typed(folder / "config.json", dict[str, Any])
        if (folder / "config.json").is_file()
        else {}
    )
    class_name = config.get("_class_name")
    if class_name != wanted.__name__:
        raise DitLoraError(
            f"{given} has a {class_name or 'folder without config.json'} in {folder.name}, "
            f"and {wanted.__name__} is asked for: "
            "a difference is of two checkpoints of one architecture"
        )
    if "quantization_config" in config:
        raise _quantised(given, [f"{folder.name}/config.json: quantization_config"])


def _quantised(given: str, why: list[str]) -> DitLoraError:
    """The error for a quantized checkpoint."""
    summary = (
        f"{given} is quantised; give the checkpoint in fp32, bf16 or fp16 that it was made from"
    )
    return DitLoraError(listed(summary, why))
