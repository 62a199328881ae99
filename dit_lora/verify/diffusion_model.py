"""Loads diffusion models with Diffusers, as users do, to verify adapters: a fresh pipeline, and one forward."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from dit_lora.adapters.layer_names import UNKNOWN_NAMES
from dit_lora.adapters.load import (
    find_missing_names,
    is_converted_lora,
    is_in_peft_format,
    load_with_pipeline_loader,
    read_pipeline_state_dict,
)
from dit_lora.adapters.lora_file import CONVERTER_ERRORS, StoredLayer, read_lora
from dit_lora.adapters.lora_mixins import allow_quantized_layers
from dit_lora.config.data import VideoShape
from dit_lora.data.cache.cache import Spec
from dit_lora.data.cache.digests import Digests
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families import get_diffusion_families
from dit_lora.families.base import Checkpoint
from dit_lora.families.latents import LOSS_MASK
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.streams import RandomInputs, RandomStreams, make_generator
from dit_lora.verify.reference_model import SEED, InputSpec, ReferenceModel

_MAX_SIDE_PATCHES = 4  # height and width of random latents in patches, if the model accepts so few
_MAX_ROUNDING_ERROR = 0.02  # relative difference of an update that rounding its matrices to bf16 can cause
_RANDOM_VALUE_PREFIX = "draw/"  # prefix for the names of random values that a training step draws
_COMPUTE_DTYPE = "compute"  # stands for the dtype that the model computes in


@dataclass(frozen=True)
class DiffusionReferenceModel(ReferenceModel):
    """The stock pipeline of one checkpoint with only its transformer loaded, for verifying a result in it."""

    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        return self.checkpoint.info.pipeline_class.__name__

    def make_input_spec(self, clips: Any, *, full_size: bool) -> InputSpec:
        """Describe random inputs for comparing outputs.

        They have shapes and dtypes of a sample as in the run, and the random numbers drawn for it. Unless `full_size`,
        height and width are smaller if the model accepts that.
        """
        # The smallest bucket of the training data: the output is only compared, not looked at.
        shape = min(clips.video_specs, key=lambda candidate: candidate.volume)
        video: Spec = clips.video_specs[shape]
        if not full_size:
            # A few patches, so that the check is cheap compared with a training step.
            # In pixels: height and width must be multiples of `size_multiple`.
            max_side = _MAX_SIDE_PATCHES * self.checkpoint.info.size_multiple
            small = VideoShape(shape.frames, min(shape.height, max_side), min(shape.width, max_side))
            if self.checkpoint.info.unsupported_reason(small) is None:
                video = _downscale_latent_spec(video, shape, small)
        tensors = {}
        for name, (size, dtype) in {**video, **clips.text_spec}.items():
            # The model's output does not depend on the loss mask.
            if name != LOSS_MASK:
                dtype_name = _COMPUTE_DTYPE if dtype.is_floating_point else str(dtype).removeprefix("torch.")
                tensors[name] = {"shape": list(size), "dtype": dtype_name}
        return {**tensors, **self._sample_scalars(tensors)}

    def _sample_scalars(self, tensors: InputSpec) -> InputSpec:
        """Random input values with one number per sample, such as the noise level, by name.

        They depend on recipe options and on defaults that a later version may change, so the values are recorded
        instead of how they were drawn.
        """
        # Only the batch's shapes decide about the random values, so any batch of these shapes will do.
        batch = {name: _sample_tensor(name, spec, SEED, torch.float32) for name, spec in tensors.items()}
        streams = RandomStreams(SEED, [SEED])
        values = {name: draw(streams(name)) for name, draw in self.checkpoint.get_random_input_samplers(batch).items()}
        scalars = {}
        for name, value in values.items():
            if value.numel() == 1:
                dtype_name = str(value.dtype).removeprefix("torch.")
                scalars[f"{_RANDOM_VALUE_PREFIX}{name}"] = {"values": value.tolist(), "dtype": dtype_name}
        return scalars

    def has_all_inputs(self, input_spec: InputSpec) -> bool:
        """True if these recorded inputs contain the noise level."""
        return any(name.startswith(_RANDOM_VALUE_PREFIX) for name in input_spec)

    def compute_output(self, model: nn.Module, input_spec: InputSpec, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """The transformer's output in one training forward of random inputs."""
        device = next(model.parameters()).device
        batch, ahead = {}, {}
        for name, spec in input_spec.items():
            if name.startswith(_RANDOM_VALUE_PREFIX):
                values = torch.tensor(spec["values"], dtype=getattr(torch, spec["dtype"]))
                ahead[name.removeprefix(_RANDOM_VALUE_PREFIX)] = values
            else:
                batch[name] = _sample_tensor(name, spec, seed, dtype).to(device)
        outputs: list[Any] = []
        # The family's loss calls the model as in training; the hook stores the model's output.
        handle = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            streams = RandomStreams(seed, [seed], RandomInputs(seed, (seed,), ahead))
            self.checkpoint.losses(model, batch, streams)
        finally:
            handle.remove()
        output: torch.Tensor | list[torch.Tensor] = outputs[-1][0]
        return torch.stack(output) if isinstance(output, list) else output  # a list of samples

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """Load a fresh transformer with the checkpoint's weights, on the CPU."""
        return self.checkpoint.denoiser.load_transformer(dtype).eval()

    def load_adapter(self, model: nn.Module, file: Path) -> nn.Module:
        """Load the adapter and its base weights as users of the stock pipeline do. Returns the model with them.

        Raises what Diffusers, PEFT and PyTorch raise for files that do not fit.
        """
        load_with_pipeline_loader(allow_quantized_layers(self._build_pipeline(model)), file)
        self._require_all_layers_loaded(model, file)
        return model

    def _require_all_layers_loaded(self, model: nn.Module, file: Path) -> None:
        """Raise `DitLoraError` with layers that the stock loader drops, or scales differently than the file says.

        Its converters do not support every layer and every alpha of other programs' formats.
        """
        # A file that Diffusers reads without conversion is checked by names and values elsewhere (`keys`).
        pipeline_class = self.checkpoint.info.pipeline_class
        if is_in_peft_format(file) or not is_converted_lora(file, read_pipeline_state_dict(pipeline_class, file)):
            return
        families = get_diffusion_families().values()
        comfyui_names = next((f.comfyui for f in families if self.name in f.pipeline_names), UNKNOWN_NAMES)
        layers = read_lora(file, model, comfyui_names, pipeline_class).layers
        problems = [problem for name, layer in layers.items() if (problem := _describe_difference(model, name, layer))]
        if problems:
            summary = f"{self.name} does not load these layers as the file has them"
            remedy = f"dit-lora export {file} --to diffusers --out OUT writes what it takes"
            raise DitLoraError(format_list(f"{summary}; {remedy}", problems))

    def read_adapter_tensors(self, file: Path) -> dict[str, torch.Tensor]:
        """The adapter's tensors as Diffusers reads the file, under the names that they have once loaded.

        Raises `DitLoraError` with all tensors of another program's format that the loader ignores.
        """
        pipeline_class = self.checkpoint.info.pipeline_class
        try:
            state = read_pipeline_state_dict(pipeline_class, file)
        except CONVERTER_ERRORS as error:
            missing = find_missing_names(pipeline_class, file)
            # Converters print all tensors after the first line.
            reason = str(error).strip().partition("\n")[0]
            problem = "take the file without these tensors" if missing else f"read the file: {reason}"
            remedy = f"dit-lora export {file} --to diffusers --out OUT writes what it takes"
            raise DitLoraError(format_list(f"{self.name} does not {problem}; {remedy}", missing)) from error
        return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}

    def list_weight_files(self) -> list[Path]:
        return sorted((self.checkpoint.path / self.checkpoint.info.part).glob("*.safetensors"))

    def compute_digest(self) -> str:
        """Digest of the transformer's weight files."""
        # No cached digests: a file that changed without a new modification time must not pass.
        return Digests(Path(os.devnull)).hash_component(self.checkpoint.path / self.checkpoint.info.part)

    def _build_pipeline(self, model: nn.Module) -> Any:
        """The stock pipeline with this transformer and no other component."""
        # model_index.json lists each component as [library, class]; options have plain values.
        index = read_component_config(self.checkpoint.path)
        transformer_names = ("transformer", self.checkpoint.info.part)
        # None for text encoders, VAE and others: Diffusers then does not load them.
        component_names = [name for name, value in index.items() if isinstance(value, list)]
        other_names = [name for name in component_names if name not in (*transformer_names, "scheduler")]
        # Diffusers reads the config of `transformer` even if it loads into another component.
        components: dict[str, Any] = dict.fromkeys(other_names) | dict.fromkeys(transformer_names, model)
        components |= self.checkpoint.info.pipeline_components()
        for name, value in index.items():
            if isinstance(value, dict):  # names of classes: JSON's keys are text
                components[name] = {int(row): label for row, label in value.items()}
        return self.checkpoint.info.load_partial_pipeline(**components)


def _describe_difference(model: nn.Module, name: str, stored_layer: StoredLayer) -> str | None:
    """Message on how a loaded layer's update differs from the file's; None if it does not."""
    layer: Any = model.get_submodule(name)
    is_loaded = isinstance(layer, LoraLayer)
    if not is_loaded:
        return f"{name}: dropped"
    adapter = next(iter(layer.scaling))
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if a.is_meta or b.is_meta:
        return None
    # Apply both updates to one random vector and compare: the products themselves may be large.
    num_inputs, generator = stored_layer.a.flatten(1).shape[1], make_generator(0, "update_probe")
    side = torch.randn(num_inputs, 1, generator=generator, dtype=torch.float64)
    expected, actual = (
        scale * (up.flatten(1).double().cpu() @ (down.flatten(1).double().cpu() @ side))
        for scale, up, down in (
            (stored_layer.alpha / stored_layer.rank, stored_layer.b, stored_layer.a),
            (layer.scaling[adapter], b.detach(), a.detach()),
        )
    )
    gap = (actual - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    # A base in bf16 rounds each matrix to 2^-8.
    return f"{name}: differs by {gap:.0%}" if gap > _MAX_ROUNDING_ERROR else None


def _downscale_latent_spec(spec: Spec, shape: VideoShape, small_shape: VideoShape) -> Spec:
    """Input description whose latents' height and width are scaled down in the proportion of the pixel sizes."""
    # Height and width of the latents. Every tensor that ends with this size is scaled.
    latents = spec["latent_mean"][0][-2:]
    small_spec = dict(spec)
    for name, (size, dtype) in spec.items():
        if size[-2:] == latents:
            height = size[-2] * small_shape.height // shape.height
            width = size[-1] * small_shape.width // shape.width
            small_spec[name] = (torch.Size([*size[:-2], height, width]), dtype)
    return small_spec


def _sample_tensor(name: str, tensor_spec: Mapping[str, Any], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A batch of one synthetic sample: normal values rounded to bf16, to be equal in every dtype.

    Ones for integers.
    """
    size = (1, *tensor_spec["shape"])
    if tensor_spec["dtype"] != _COMPUTE_DTYPE:
        return torch.ones(size, dtype=getattr(torch, tensor_spec["dtype"]))
    values = torch.randn(size, generator=make_generator(seed, "output", name))
    return values.bfloat16().to(dtype)
