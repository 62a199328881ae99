"""Loads diffusion models as Diffusers does, for checks of an adapter: a fresh pipeline, and one call of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from dit_lora.adapters.layer_names import UNKNOWN, LayerNames
from dit_lora.adapters.load import (
    in_peft_format,
    is_converted_lora,
    load_as_stock,
    missing_names,
    stock_state,
)
from dit_lora.adapters.lora_file import OF_CONVERTERS, StoredLayer, read_lora
from dit_lora.adapters.lora_mixins import over_narrow_layers
from dit_lora.config.data import VideoShape
from dit_lora.data.cache.cache import Spec
from dit_lora.data.cache.digests import Digests
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, listed
from dit_lora.families import DIFFUSION_FAMILIES, get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.loss_mask import LOSS_MASK
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.streams import Drawn, Streams, generator
from dit_lora.results.verify.reference_model import SEED, Inputs, ReferenceModel

_SIDE = 4  # patches of height and of width that made-up latents have, where the model takes so few
_ROUNDING = 0.02  # relative difference of an update that rounding its matrices to bf16 can make
_DRAW = "draw/"  # before the name of what a training step draws
_COMPUTE = "compute"  # in place of a dtype: the one that the model computes in


@dataclass(frozen=True)
class DiffusionStock(ReferenceModel):
    """The stock pipeline of one checkpoint, with nothing in it but its transformer."""

    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        return self.checkpoint.pipeline_class.__name__

    def inputs(self, clips: Any, *, whole: bool) -> Inputs:
        """Return shapes and dtypes of a sample as the run has them, and what is drawn for it.

        Unless `whole`, height and width are smaller, where the model takes that.
        """
        shape = min(clips.video_specs, key=lambda one: one.volume)
        video: Spec = clips.video_specs[shape]
        if not whole:
            # A few patches, where the model takes so few: the check is to cost little beside a step.
            most = _SIDE * self.checkpoint.side_step
            small = VideoShape(shape.frames, min(shape.height, most), min(shape.width, most))
            if self.checkpoint.refusal(small) is None:
                video = _shrunk(video, shape, small)
        tensors = {
            name: {
                "shape": list(size),
                "dtype": _COMPUTE if dtype.is_floating_point else str(dtype).removeprefix("torch."),
            }
            for name, (size, dtype) in {**video, **clips.text_spec}.items()
            # The model's output does not depend on it.
            if name != LOSS_MASK
        }
        return {**tensors, **self._drawn_numbers(tensors)}

    def _drawn_numbers(self, tensors: Inputs) -> Inputs:
        """Return the draws of one number a sample, such as the noise level.

        They depend on options of the recipe and on defaults that a later version may change, so the values are kept
        and not how they were drawn.
        """
        batch = {name: _drawn(name, one, SEED, torch.float32) for name, one in tensors.items()}
        streams = Streams(SEED, [SEED])
        drawn = {name: draw(streams(name)) for name, draw in self.checkpoint.draws(batch).items()}
        return {
            f"{_DRAW}{name}": {
                "values": one.tolist(),
                "dtype": str(one.dtype).removeprefix("torch."),
            }
            for name, one in drawn.items()
            if one.numel() == 1
        }

    def has_all_inputs(self, inputs: Inputs) -> bool:
        return any(name.startswith(_DRAW) for name in inputs)

    def output(
        self, model: nn.Module, inputs: Inputs, seed: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the transformer's output in one training forward of made-up inputs, as it returns it."""
        device = next(model.parameters()).device
        batch, ahead = {}, {}
        for name, one in inputs.items():
            if name.startswith(_DRAW):
                values = torch.tensor(one["values"], dtype=getattr(torch, one["dtype"]))
                ahead[name.removeprefix(_DRAW)] = values
            else:
                batch[name] = _drawn(name, one, seed, dtype).to(device)
        outputs: list[Any] = []
        # The family's own loss calls the model as training does; the hook keeps what it returned.
        handle = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            streams = Streams(seed, [seed], Drawn(seed, (seed,), ahead))
            self.checkpoint.losses(model, batch, streams)
        finally:
            handle.remove()
        output: torch.Tensor | list[torch.Tensor] = outputs[-1][0]
        return torch.stack(output) if isinstance(output, list) else output  # a list of samples

    def load(self, dtype: torch.dtype) -> nn.Module:
        """Return a fresh transformer with the checkpoint's weights, on the CPU."""
        return self.checkpoint.load_transformer(dtype).eval()

    def put(self, model: nn.Module, file: Path) -> nn.Module:
        """Load the adapter and base weights beside it as users of the stock pipeline do; return the model with them.

        Raises what Diffusers, PEFT and PyTorch raise for files that do not fit.
        """
        load_as_stock(over_narrow_layers(self._pipeline(model)), file)
        self._require_whole(model, file)
        return model

    def _require_whole(self, model: nn.Module, file: Path) -> None:
        """Raise `DitLoraError` with the layers that the stock loader drops, or scales differently than the file.

        Its converters know not every layer of other programs' forms, and not every alpha.
        """
        pipeline_class = self.checkpoint.pipeline_class
        if in_peft_format(file) or not is_converted_lora(file, stock_state(pipeline_class, file)):
            return
        layers = read_lora(file, model, _layer_names(self.name), pipeline_class).layers
        problems = [
            problem for name, layer in layers.items() if (problem := _differs(model, name, layer))
        ]
        if problems:
            remedy = f"dit-lora export {file} --to diffusers --out OUT writes what it takes"
            raise DitLoraError(
                listed(
                    f"{self.name} does not load these layers as the file has them; {remedy}",
                    problems,
                )
            )

    def stored(self, file: Path) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by the names that a loaded one has, as Diffusers reads the file.

        Raises `DitLoraError` with all that its loader misses in a file of another program's form.
        """
        pipeline_class = self.checkpoint.pipeline_class
        try:
            state = stock_state(pipeline_class, file)
        except OF_CONVERTERS as error:
            missing = missing_names(pipeline_class, file)
            reason = str(error).strip().partition("\n")[0]
            why = "take the file without these tensors" if missing else f"read the file: {reason}"
            remedy = f"dit-lora export {file} --to diffusers --out OUT writes what it takes"
            raise DitLoraError(listed(f"{self.name} does not {why}; {remedy}", missing)) from error
        return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}

    def weight_files(self) -> list[Path]:
        return sorted((self.checkpoint.path / self.checkpoint.part).glob("*.safetensors"))

    def digest(self) -> str:
        # Nothing is remembered: a file that changed behind its time of change must not pass.
        return Digests(Path(os.devnull)).component(self.checkpoint.path / self.checkpoint.part)

    def _pipeline(self, model: nn.Module) -> Any:
        index = read_component_config(self.checkpoint.path)
        own = ("transformer", self.checkpoint.part)
        others = [
            name
            for name, value in index.items()
            if isinstance(value, list) and name not in (*own, "scheduler")
        ]
        # Diffusers asks `transformer` for its config even where it loads into another part.
        components: dict[str, Any] = dict.fromkeys(others) | dict.fromkeys(own, model)
        for name, value in index.items():
            if isinstance(value, dict):  # names of classes: JSON's keys are text
                components[name] = {int(row): label for row, label in value.items()}
        return load_pretrained(self.checkpoint.pipeline_class, self.checkpoint.path, **components)


def _layer_names(pipeline: str) -> LayerNames:
    families = (get_family(name) for name in DIFFUSION_FAMILIES)
    return next((f.comfyui for f in families if pipeline in f.pipeline_names), UNKNOWN)


def _differs(model: nn.Module, name: str, stored: StoredLayer) -> str | None:
    """Say how a loaded layer's update differs from that of the file; None if it does not."""
    layer: Any = model.get_submodule(name)
    is_loaded = isinstance(layer, LoraLayer)
    if not is_loaded:
        return f"{name}: dropped"
    adapter = next(iter(layer.scaling))
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if a.is_meta or b.is_meta:
        return None
    # The updates' images of one random vector are compared: the products themselves may be large.
    side = torch.randn(
        stored.a.flatten(1).shape[1], 1, generator=generator(0, "update_probe"), dtype=torch.float64
    )
    expected, found = (
        scale * (up.flatten(1).double().cpu() @ (down.flatten(1).double().cpu() @ side))
        for scale, up, down in (
            (stored.alpha / stored.rank, stored.b, stored.a),
            (layer.scaling[adapter], b.detach(), a.detach()),
        )
    )
    gap = (found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    # A base in bf16 rounds each matrix to 2^-8.
    return f"{name}: differs by {gap:.0%}" if gap > _ROUNDING else None


def _shrunk(spec: Spec, shape: VideoShape, small: VideoShape) -> Spec:
    """Return the spec with height and width, the last sizes of latents, shrunk in the proportions of the pixels'."""
    latents = spec["latent_mean"][0][-2:]
    return {
        name: (size, dtype)
        if size[-2:] != latents
        else (
            torch.Size(
                [
                    *size[:-2],
                    size[-2] * small.height // shape.height,
                    size[-1] * small.width // shape.width,
                ]
            ),
            dtype,
        )
        for name, (size, dtype) in spec.items()
    }


def _drawn(name: str, one: Mapping[str, Any], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a batch of one: normal values that bf16 holds, to be the same in every dtype; ones for integers."""
    size = (1, *one["shape"])
    if one["dtype"] != _COMPUTE:
        return torch.ones(size, dtype=getattr(torch, one["dtype"]))
    values = torch.randn(size, generator=generator(seed, "output", name))
    return values.bfloat16().to(dtype)
