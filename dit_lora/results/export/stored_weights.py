"""A transformer's weights as a checkpoint has them on disk: by Diffusers' names, one tensor at a time."""

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

# What stands before Diffusers' names in files of other programs that have them.
_PREFIXES = ("", "transformer.", "model.diffusion_model.", "diffusion_model.")
_OF_HUB = ("*.json", "transformer*/*.safetensors")


@dataclass(frozen=True)
class CheckpointPlace:
    """The place of a checkpoint: a pipeline's folder, a transformer's own, or a single file."""

    given: str
    path: Path
    is_pipeline: bool

    @property
    def has_two(self) -> bool:
        """Return true for a pipeline with two experts."""
        return self.is_pipeline and all((self.path / part).is_dir() for part in EXPERTS)

    @property
    def part(self) -> str:
        """The component that it is, as its name says where it is no pipeline."""
        names = {self.path.name, self.path.stem.partition(".")[0]}
        for part, expert in EXPERTS.items():
            if part in names or self.path.stem.endswith(f"_{expert}"):
                return part
        return "transformer"

    def folder(self, part: str) -> Path:
        """Return the folder of the transformer's files."""
        return self.path / part if self.is_pipeline else self.path


def find_place(given: str) -> CheckpointPlace:
    """Return the checkpoint at a path, or the Hub pipeline of that name. Raises `DitLoraError` if there is none."""
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
    """The weights of one transformer, each read when it is asked for; to be used in `with`.

    A file with the published model's own names is converted by Diffusers, whole: its tensors stay on disk but where
    the conversion joins or turns them.
    """

    def __init__(self, place: CheckpointPlace, checkpoint: Denoiser, model: nn.Module) -> None:
        """Open it for a model of its architecture, whose values count for nothing.

        Raises `DitLoraError` for another architecture, and for weights in less than half precision.
        """
        self._given, self._files = place.given, ExitStack()
        self._read: dict[str, Callable[[], torch.Tensor]] = {}
        self.shapes: dict[str, list[int]] = {}
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        try:
            self._open(place, checkpoint, expected)
        except (OSError, SafetensorError) as error:
            self._files.close()
            raise DitLoraError(f"{place.given} cannot be read: {error}; it is not whole") from error
        except DitLoraError:
            self._files.close()
            raise
        wrong = [
            f"{name}: {self.shapes.get(name, 'not there')}, the model has {shape}"
            for name, shape in expected.items()
            if self.shapes.get(name) != shape
        ]
        if wrong:
            self._files.close()
            what = (
                f"{place.given} is of another model than {checkpoint.transformer_class.__name__} "
                f"of {checkpoint.path.name}"
            )
            raise DitLoraError(listed(what, wrong))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def tensor(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def _open(
        self, place: CheckpointPlace, checkpoint: Denoiser, expected: Mapping[str, list[int]]
    ) -> None:
        if not place.path.is_file():
            folder = place.folder(checkpoint.part)
            _require_class(place.given, folder, checkpoint.transformer_class)
            for file in weight_files(folder):
                self._add(file, "")
            return
        if place.path.suffix != ".safetensors":
            raise DitLoraError(f"{place.given} is no .safetensors file; convert it first")
        with safe_open(place.path, framework="pt") as opened:
            names = set(opened.keys())
        for prefix in _PREFIXES:
            if {f"{prefix}{name}" for name in expected} <= names:
                self._add(place.path, prefix)
                return
        self._convert(place, checkpoint)

    def _add(self, file: Path, prefix: str) -> None:
        """Add the tensors of a file whose names begin so."""
        opened = self._files.enter_context(safe_open(file, framework="pt"))
        narrow = []
        for key in opened.keys():  # noqa: SIM118
            if not key.startswith(prefix):
                continue
            name, header = key.removeprefix(prefix), opened.get_slice(key)
            self._read[name] = partial(opened.get_tensor, key)
            self.shapes[name] = header.get_shape()
            if header.get_dtype() not in FLOATS:
                narrow.append(f"{name}: {header.get_dtype()}")
        if narrow:
            raise _quantised(self._given, narrow)

    def _convert(self, place: CheckpointPlace, checkpoint: Denoiser) -> None:
        """Add the tensors of a file with other names, as Diffusers' `from_single_file` reads it."""
        read = getattr(checkpoint.transformer_class, "from_single_file", None)
        name = checkpoint.transformer_class.__name__
        if read is None:
            raise DitLoraError(
                f"{place.given} has other names than {name}, whose single files Diffusers does not read"
            )
        try:
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
        tensors: Mapping[str, torch.Tensor] = model.state_dict()
        narrow = [
            f"{own}: {one.dtype}"
            for own, one in tensors.items()
            if one.dtype not in FLOATS.values()
        ]
        if narrow:
            raise _quantised(self._given, narrow)
        for own, tensor in tensors.items():
            self._read[own] = tensor.detach
            self.shapes[own] = list(tensor.shape)


def _require_class(given: str, folder: Path, wanted: Any) -> None:
    """Raise `DitLoraError` for a folder of another class, or of a quantised model."""
    config = (
        read_typed(folder / "config.json", dict[str, Any])
        if (folder / "config.json").is_file()
        else {}
    )
    found = config.get("_class_name")
    if found != wanted.__name__:
        raise DitLoraError(
            f"{given} has a {found or 'folder without config.json'} in {folder.name}, "
            f"and {wanted.__name__} is asked for: "
            "a difference is of two checkpoints of one architecture"
        )
    if "quantization_config" in config:
        raise _quantised(given, [f"{folder.name}/config.json: quantization_config"])


def _quantised(given: str, why: list[str]) -> DitLoraError:
    what = f"{given} is quantised; give the checkpoint in fp32, bf16 or fp16 that it was made from"
    return DitLoraError(listed(what, why))
