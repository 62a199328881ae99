"""Every readable form of a LoRA file, for every family: each layer gets the update that its factors and alpha say.

The files are made from random factors for every layer of the tiny models. Where a published model joins layers or
reorders rows, the truth comes from Diffusers' own converters of checkpoints, which are given the updates as weights.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import nn

from dit_lora.adapters.attach import find_adaptable_layers
from dit_lora.adapters.lora_file import LoraFile, read_lora
from dit_lora.adapters.published_names import PUBLISHED_NAMES
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import DIFFUSION_FAMILIES, get_family

ROOT = Path(__file__).parents[3]
RANK, ALPHA = 3, 5.0
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FileForm:
    """One program's way to write a LoRA."""

    program: str
    key: str
    """A layer's key: {name} with dots or {joined} with underscores."""
    down: str
    up: str
    alpha: str
    """Where alpha is: "tensors", "header", "config", or "none" (then it is the rank)."""
    is_published: bool = False
    """True if the layers have the published model's names, where these are known, and False for Diffusers'."""

    @property
    def row(self) -> str:
        """The row of the table in docs/export.md."""
        names = "the published model's" if self.is_published else "Diffusers'"
        alpha_location = {
            "tensors": "`.alpha` tensors",
            "header": "in the header",
            "config": "`adapter_config.json`",
            "none": "the rank",
        }[self.alpha]
        key = self.key.format(name="NAME", joined="NA_ME")
        return f"| {self.program} | `{key}.{self.down}.weight`, `.{self.up}.weight` | {names} | {alpha_location} |"


FORMS = {
    "diffusers": FileForm("Diffusers", "transformer.{name}", "lora_A", "lora_B", "header"),
    "peft": FileForm("PEFT", "base_model.model.{name}", "lora_A", "lora_B", "config"),
    "kohya": FileForm("kohya's sd-scripts", "lora_unet_{joined}", "lora_down", "lora_up", "tensors", True),
    "videox_fun": FileForm("kohya's layout of VideoX-Fun", "lora_unet__{joined}", "lora_down", "lora_up", "tensors"),
    "comfyui": FileForm("ComfyUI", "diffusion_model.{name}", "lora_A", "lora_B", "tensors", True),
    "comfyui_model": FileForm(
        "ComfyUI's saving node",
        "model.diffusion_model.{name}",
        "lora_down",
        "lora_up",
        "tensors",
        True,
    ),
    "ai_toolkit": FileForm("ai-toolkit, Diffusers' models", "transformer.{name}", "lora_A", "lora_B", "tensors"),
    "ai_toolkit_published": FileForm(
        "ai-toolkit, its own models", "diffusion_model.{name}", "lora_A", "lora_B", "none", True
    ),
    "musubi": FileForm("musubi-tuner", "lora_unet_{joined}", "lora_down", "lora_up", "tensors", True),
    "musubi_diffusers": FileForm(
        "musubi-tuner, Qwen-Image and Z-Image",
        "lora_unet_{joined}",
        "lora_down",
        "lora_up",
        "tensors",
    ),
    "onetrainer": FileForm("OneTrainer", "lora_transformer_{joined}", "lora_down", "lora_up", "tensors"),
    "onetrainer_dotted": FileForm("OneTrainer, newer models", "transformer.{name}", "lora_down", "lora_up", "tensors"),
    "diffsynth": FileForm("DiffSynth-Studio", "{name}", "lora_A.default", "lora_B.default", "none", True),
    "diffsynth_diffusers": FileForm(
        "DiffSynth-Studio, Diffusers' models", "{name}", "lora_A.default", "lora_B.default", "none"
    ),
    "simpletuner": FileForm("SimpleTuner", "transformer.{name}", "lora_A", "lora_B", "header"),
    "simpletuner_comfyui": FileForm(
        "SimpleTuner, `--lora_format=comfyui`",
        "diffusion_model.{name}",
        "lora_A",
        "lora_B",
        "tensors",
    ),
    "lycoris": FileForm("LyCORIS, also SimpleTuner's", "lycoris_{joined}", "lora_down", "lora_up", "tensors"),
}

CONVERTERS: dict[str, Callable[..., Tensors]] = {
    "ChromaTransformer2DModel": single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers,
    "FluxTransformer2DModel": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
    "Flux2Transformer2DModel": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    "SD3Transformer2DModel": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    "ZImageTransformer2DModel": single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
}


@dataclass(frozen=True)
class Tiny:
    """A tiny model, and the sizes of its published layers by name."""

    model: nn.Module
    family: str
    pipeline_class: Any
    published: dict[str, list[str]]
    """Diffusers' layers of each layer of the published model."""


@pytest.fixture(scope="module")
def tiny_models(tiny_checkpoints: dict[str, Path]) -> dict[str, list[Tiny]]:
    """The models of every family, one of each variant that has layers of its own."""
    models: dict[str, list[Tiny]] = {}
    for family in DIFFUSION_FAMILIES:
        known_layers = set()
        for variant in get_family(family).tiny_variants:
            path = str(tiny_checkpoints[variant])
            checkpoint = get_family(family).open(ModelConfig(family=family, path=path))
            model = checkpoint.denoiser.load_transformer(torch.float32)
            layers = tuple(find_adaptable_layers(model))
            if layers in known_layers:
                continue
            known_layers.add(layers)
            tiny = Tiny(model, family, checkpoint.info.pipeline_class, published_layers(model, family))
            models.setdefault(family, []).append(tiny)
    return models


def published_layers(model: nn.Module, family: str) -> dict[str, list[str]]:
    layers, names = find_adaptable_layers(model), get_family(family).comfyui
    table = PUBLISHED_NAMES.get(type(model).__name__)
    layer_names = {}
    if table is None:
        for name in layers:
            published_name = names.translate_layer_name(name)
            layer_names[name if published_name is None else published_name.removeprefix(names.prefix)] = [name]
        return layer_names
    for number in range(max(len(layers), 1)):
        for published_pattern, parts in table.items():
            part_layers = [part.replace("*", str(number)) for part in parts]
            if set(part_layers) <= set(layers):
                layer_names[published_pattern.replace("*", str(number))] = part_layers
    named_layers = {name for part_layers in layer_names.values() for name in part_layers}
    # The published model has the other layers by the same names.
    return layer_names | {name: [name] for name in layers if name not in named_layers}


def size_of(model: nn.Module, name: str) -> list[int]:
    return list(model.get_submodule(name).weight.shape)  # type: ignore[union-attr,arg-type]


def factors_of(tiny: Tiny, form: FileForm) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    """Random factors and alpha for every layer, by the name that the form has for it without its prefix."""
    generator = torch.Generator().manual_seed(5)
    layers = {name: [name] for name in find_adaptable_layers(tiny.model)}
    for number, (name, part_layers) in enumerate((tiny.published if form.is_published else layers).items()):
        _, *inputs = size_of(tiny.model, part_layers[0])
        outputs = sum(size_of(tiny.model, layer)[0] for layer in part_layers)
        kernel_shape = [1] * (len(inputs) - 1)
        a = torch.randn(RANK, *inputs, generator=generator)
        b = torch.randn(outputs, RANK, *kernel_shape, generator=generator)
        alphas = {"tensors": 0.5 + number % 7, "none": float(RANK)}
        yield name, a, b, alphas.get(form.alpha, 2 * ALPHA if number == 1 else ALPHA)


def write_file(tiny: Tiny, form: FileForm, folder: Path) -> tuple[Path, Tensors]:
    """Write a file in this form; return it and the update of every layer by the form's name of it."""
    tensors, updates, patterns = {}, {}, {}
    for name, a, b, alpha in factors_of(tiny, form):
        key = form.key.format(name=name, joined=name.replace(".", "_"))
        tensors |= {f"{key}.{form.down}.weight": a, f"{key}.{form.up}.weight": b}
        if form.alpha == "tensors":
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
        elif alpha != ALPHA:
            patterns[f"^{re.escape(name)}"] = alpha
        update = alpha / RANK * b.flatten(1).double() @ a.flatten(1).double()
        updates[name] = update.reshape(len(b), *a.shape[1:])
    config = {"r": RANK, "lora_alpha": ALPHA, "alpha_pattern": patterns, "target_modules": ["to_q"]}
    header = {f"transformer.{key}": value for key, value in config.items()}
    metadata = {"lora_adapter_metadata": json.dumps(header)} if form.alpha == "header" else None
    file = folder / "theirs.safetensors"
    if form.alpha == "config":
        file = folder / "adapter_model.safetensors"
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file(tensors, file, metadata=metadata)
    return file, updates


# Rows of q, k, v and the MLP in FLUX.1's published single blocks; also 2 and 3 divide it.
_JOINED_ROWS = 3 * 3072 + 4 * 3072


class Filled(dict[str, torch.Tensor]):
    """A published checkpoint, in which biases and norms are zeros wherever a converter asks for them."""

    def pop(self, key: str, *_: Any) -> torch.Tensor:
        return super().pop(key, torch.zeros(_JOINED_ROWS))


def as_diffusers(tiny: Tiny, updates: Tensors) -> Tensors:
    """The updates of the published model's layers by Diffusers' layers, as its converter of checkpoints has them."""
    convert = CONVERTERS.get(type(tiny.model).__name__)
    if convert is None:
        # A layer that joins several has equally many rows of each, as Diffusers' converter of LoRAs assumes.
        chunked = ((tiny.published[name], update) for name, update in updates.items())
        return {
            layer: rows
            for layers, update in chunked
            for layer, rows in zip(layers, update.chunk(len(layers)), strict=True)
        }
    # The converter of FLUX.1 has the published widths of this layer written into it.
    joined_updates = {name: update for name, update in updates.items() if name.endswith(".linear1")}
    joined_updates = joined_updates if "Flux2" not in type(tiny.model).__name__ else {}
    separate = Filled({f"{n}.weight": u for n, u in updates.items() if n not in joined_updates})
    if joined_updates:
        separate |= {f"{name}.weight": torch.zeros(_JOINED_ROWS, 1) for name in joined_updates}
    converted = convert(separate, config={})
    layers = set(find_adaptable_layers(tiny.model))
    truth = {n.removesuffix(".weight"): u for n, u in converted.items() if n.endswith(".weight")}
    for name, update in joined_updates.items():
        part_layers = tiny.published[name]
        sizes = [size_of(tiny.model, layer)[0] for layer in part_layers]
        truth |= dict(zip(part_layers, update.split(sizes), strict=True))
    return {name: update for name, update in truth.items() if name in layers}


def read(tiny: Tiny, file: Path) -> LoraFile:
    return read_lora(file, tiny.model, get_family(tiny.family).comfyui, tiny.pipeline_class)


def assert_reads(stored: LoraFile, truth: Mapping[str, torch.Tensor]) -> None:
    assert stored.layers.keys() == truth.keys()
    for name, layer in stored.layers.items():
        product = layer.b.flatten(1).double() @ layer.a.flatten(1).double()
        actual = (layer.alpha / layer.rank * product).reshape(truth[name].shape)
        torch.testing.assert_close(actual, truth[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", DIFFUSION_FAMILIES)
def test_every_layer_of_every_form_has_the_update_of_its_factors(
    tiny_models: dict[str, list[Tiny]], tmp_path: Path, family: str, form: str
) -> None:
    for tiny in tiny_models[family]:
        file, updates = write_file(tiny, FORMS[form], tmp_path)
        truth = as_diffusers(tiny, updates) if FORMS[form].is_published else updates
        assert truth.keys() == set(find_adaptable_layers(tiny.model))
        assert_reads(read(tiny, file), truth)


def test_the_page_lists_the_forms_of_this_table() -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    table = page.partition("| written by |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == [form.row for form in FORMS.values()]
