"""Reads a transformer's weights from a checkpoint on disk, by Diffusers' names, one tensor at a time."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from dit_lora.adapters.lora_file import CONVERTER_ERRORS
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.records import read_typed_json
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.environment.safetensors_files import FLOAT_DTYPES, open_safetensors, read_header
from dit_lora.errors import DitLoraError, format_list
from dit_lora.export.merge_pipeline import list_weight_files
from dit_lora.families.base import Denoiser
from dit_lora.verify.locate import find_pipeline_folder

# Prefixes of Diffusers' names in files of other programs.
_KEY_PREFIXES = ("", "transformer.", "model.diffusion_model.", "diffusion_model.")
_HUB_PATTERNS = ("*.json", "transformer*/*.safetensors")


@dataclass(frozen=True)
class CheckpointLocation:
    """Location of a checkpoint: a pipeline's folder, a transformer's folder, or a single file."""

    source: str
    path: Path
    is_pipeline: bool

    @property
    def part(self) -> str:
        """The component that a checkpoint outside a pipeline contains, judging by its name."""
        # Such as `transformer_2/`, `transformer_2.safetensors` or `model_low_noise.safetensors`.
        names = {self.path.name, self.path.stem.partition(".")[0]}
        for part, expert in EXPERT_NAMES.items():
            if part in names or self.path.stem.endswith(f"_{expert}"):
                return part
        return "transformer"

    def get_component_dir(self, part: str) -> Path:
        """Folder of the transformer's files."""
        return self.path / part if self.is_pipeline else self.path


def find_checkpoint(source: str) -> CheckpointLocation:
    """Locate the checkpoint at a path, or the Hub pipeline of that name. Raises `DitLoraError` if there is none."""
    # A Hub name is downloaded here: only configs and the transformer's weights.
    path = resolve_result_folder(Path(source).expanduser(), _HUB_PATTERNS)
    pipeline = find_pipeline_folder(path)
    if pipeline is not None:
        return CheckpointLocation(source, pipeline, True)
    if path.is_file() or (path / "config.json").is_file():
        return CheckpointLocation(source, path, False)
    raise DitLoraError(
        f"{source} is not a checkpoint; give a pipeline's folder (model_index.json), its transformer's "
        "(config.json), a .safetensors file, or a pipeline's name on the Hub"
    )


class StoredWeights:
    """The weights of one transformer, each read when used. A context manager.

    Diffusers converts a file with the published model's own names, as a whole. Its tensors stay on disk unless the
    conversion joins or permutes them.
    """

    def __init__(self, location: CheckpointLocation, denoiser: Denoiser, model: nn.Module) -> None:
        """Open a checkpoint's weights for a model of its architecture. The model's values are not used.

        Raises:
            DitLoraError: Another architecture, or weights in less than half precision.
        """
        self._source = location.source
        self._tensor_readers: dict[str, Callable[[], torch.Tensor]] = {}
        self.shapes: dict[str, list[int]] = {}
        # What the architecture needs, by Diffusers' names.
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        with ExitStack() as open_files:
            self._open_files = open_files
            self._index_tensors(location, denoiser, expected)
            # All names and shapes are known here, and no tensor has been read.
            differing = {name: shape for name, shape in expected.items() if self.shapes.get(name) != shape}
            if differing:
                expected_model = f"{denoiser.transformer_class.__name__} of {denoiser.info.path.name}"
                summary = f"{location.source} belongs to a different model than {expected_model}"
                pairs = [(name, self.shapes.get(name, "not there"), shape) for name, shape in differing.items()]
                mismatches = [f"{name}: {stored}, the model has {shape}" for name, stored, shape in pairs]
                raise DitLoraError(format_list(summary, mismatches))
            # An error above closes the files. Without one they stay open, to be read later.
            self._open_files = open_files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor of the checkpoint."""
        return self._tensor_readers[name]()

    def _index_tensors(
        self, location: CheckpointLocation, denoiser: Denoiser, expected: Mapping[str, list[int]]
    ) -> None:
        if not location.path.is_file():
            folder = location.get_component_dir(denoiser.info.part)
            _require_class(location.source, folder, denoiser.transformer_class)
            for file in list_weight_files(folder):
                self._open_weight_file(file, "")
            return
        if location.path.suffix != ".safetensors":
            raise DitLoraError(f"{location.source} is not a .safetensors file; convert it first")
        # One file: find out which prefix its keys have. Each candidate must cover all of the model's tensors.
        names = read_header(location.path).tensors.keys()
        for prefix in _KEY_PREFIXES:
            if {f"{prefix}{name}" for name in expected} <= names:
                self._open_weight_file(location.path, prefix)
                return
        # No prefix fits: the names are those of the published model, not of Diffusers.
        self._convert_published_tensors(location, denoiser)

    def _open_weight_file(self, file: Path, prefix: str) -> None:
        """Register the tensors of a file whose names begin with this prefix."""
        # Stays open until the context ends, so that each tensor is read when it is asked for.
        opened = self._open_files.enter_context(open_safetensors(file))
        unsupported = []
        for key in opened.keys():  # noqa: SIM118
            if not key.startswith(prefix):
                continue
            name, header = key.removeprefix(prefix), opened.get_slice(key)
            self._tensor_readers[name] = partial(opened.get_tensor, key)
            self.shapes[name] = header.get_shape()
            # fp8 or packed integers: their difference would be that of rounded values.
            if header.get_dtype() not in FLOAT_DTYPES:
                unsupported.append(f"{name}: {header.get_dtype()}")
        if unsupported:
            raise _make_quantization_error(self._source, unsupported)

    def _convert_published_tensors(self, location: CheckpointLocation, denoiser: Denoiser) -> None:
        """Register the tensors of a file with the published names, converted by Diffusers' `from_single_file`."""
        read = getattr(denoiser.transformer_class, "from_single_file", None)
        name = denoiser.transformer_class.__name__
        if read is None:
            raise DitLoraError(
                f"the tensor names of {location.source} are not those of {name}, and Diffusers cannot convert them"
            )
        try:
            # `config` and `subfolder` point to local files, so that Diffusers downloads nothing.
            model = read(
                str(location.path), config=str(denoiser.info.path), subfolder=denoiser.info.part, local_files_only=True
            )
        except (*CONVERTER_ERRORS, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DitLoraError(f"Diffusers cannot read {location.source} as a {name}: {reason}") from error
        # Tensors of this model are views of the file where the conversion left them unchanged.
        tensors: Mapping[str, torch.Tensor] = model.state_dict()
        unsupported = [f"{key}: {x.dtype}" for key, x in tensors.items() if x.dtype not in FLOAT_DTYPES.values()]
        if unsupported:
            raise _make_quantization_error(self._source, unsupported)
        self._tensor_readers |= {key: tensor.detach for key, tensor in tensors.items()}
        self.shapes |= {key: list(tensor.shape) for key, tensor in tensors.items()}


def _require_class(source: str, folder: Path, expected_class: Any) -> None:
    """Raise `DitLoraError` for a folder with another model class, or a quantized model."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise DitLoraError(f"{source} is not a checkpoint of a {expected_class.__name__}: it has no {config_file}")
    config = read_typed_json(config_file, dict[str, Any])
    class_name = config.get("_class_name")
    if class_name != expected_class.__name__:
        raise DitLoraError(
            f"the {folder.name} of {source} is a {class_name} and not a {expected_class.__name__}; "
            "give two checkpoints of one architecture"
        )
    if "quantization_config" in config:
        raise _make_quantization_error(source, [f"{folder.name}/config.json: quantization_config"])


def _make_quantization_error(source: str, reasons: list[str]) -> DitLoraError:
    summary = f"{source} is quantised; give the checkpoint in fp32, bf16 or fp16 that it was made from"
    return DitLoraError(format_list(summary, reasons))
