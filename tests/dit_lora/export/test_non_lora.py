"""Adapters of other kinds than LoRA in every format that reads them; merged weights equal PEFT's."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from exported import Trained, trained
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dit_lora.config.lora import AdapterKind
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family

KINDS: tuple[AdapterKind, ...] = ("dora", "lokr", "loha", "oft")
FILES = {"dora": "pytorch_lora_weights.safetensors", "lokr": "pytorch_lora_weights.safetensors"}
PEFT_FILE = "adapter_model.safetensors"


def adapter_of(kind: AdapterKind, checkpoints: dict[str, Path], folder: Path, **options: Any) -> Trained:
    return trained("flux2", checkpoints["flux2-klein"], folder, kind=kind, scale=0.05, **options)


def written(kind: AdapterKind, folder: Path) -> Path:
    return folder / FILES.get(kind, PEFT_FILE)


def layers(model: Any) -> dict[str, Any]:
    tuner_layers = ((n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer))
    return {name.removeprefix("base_model.model."): module for name, module in tuner_layers}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_what_the_adapted_layers_compute(
    kind: AdapterKind, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trained_adapter = adapter_of(kind, tiny_checkpoints, tmp_path / "adapter")
    output_folder = export(
        ExportRequest((trained_adapter.folder,), "merged", tmp_path / "out", model=str(trained_adapter.base))
    )
    checkpoint = get_family("flux2").open(ModelConfig(family="flux2", path=str(output_folder)))
    merged = checkpoint.denoiser.load_transformer(torch.float32)
    adapted = layers(trained_adapter.model)
    assert len(adapted) > 4
    for name, layer in adapted.items():
        plain = merged.get_submodule(name)
        x = torch.randn(3, 5, plain.in_features, generator=torch.Generator().manual_seed(len(name)))
        expected = layer(x)
        assert (expected - layer.base_layer(x)).abs().max() > 1e-3
        torch.testing.assert_close(functional.linear(x, plain.weight, plain.bias), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_to_peft_and_back_bit_for_bit(
    kind: AdapterKind, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trained_adapter = adapter_of(kind, tiny_checkpoints, tmp_path / "adapter")
    output_folder = export(
        ExportRequest((trained_adapter.folder,), "peft", tmp_path / "out", model=str(trained_adapter.base))
    )
    base_model = trained_adapter.checkpoint.denoiser.load_transformer(torch.float32)
    loaded_layers = layers(peft.PeftModel.from_pretrained(base_model, str(output_folder)).eval())
    for name, layer in layers(trained_adapter.model).items():
        x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(len(name)))
        assert torch.equal(loaded_layers[name](x), layer(x))
    request = ExportRequest((output_folder,), "diffusers", tmp_path / "again", model=str(trained_adapter.base))
    if kind in FILES:
        original, round_trip = (
            load_file(written(kind, folder)) for folder in (trained_adapter.folder, export(request))
        )
        assert original.keys() == round_trip.keys()
        assert all(torch.equal(original[key], round_trip[key]) for key in original)
    else:
        with pytest.raises(DitLoraError, match=f"nothing reads {kind} in this form"):
            export(request)


def comfyui_delta(own: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """What ComfyUI adds of a layer's tensors without `alpha` (comfy/weight_adapter/lokr.py, loha.py)."""
    if "hada_w1_a" in own:
        return (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    second = own.get("lokr_w2")
    second = own["lokr_w2_a"] @ own["lokr_w2_b"] if second is None else second
    return torch.kron(own["lokr_w1"], second).reshape(shape)


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_comfyui_adds_the_same_update(kind: AdapterKind, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    trained_adapter = adapter_of(kind, tiny_checkpoints, tmp_path / "adapter", rank=2, alpha=5)
    output_folder = export(
        ExportRequest((trained_adapter.folder,), "comfyui", tmp_path / "out", model=str(trained_adapter.base))
    )
    tensors = load_file(output_folder / "out.safetensors")
    names = get_family("flux2").comfyui
    expected_keys = set()
    for name, layer in layers(trained_adapter.model).items():
        key = f"{names.translate_layer_name(name)}."
        layer_tensors = {n.removeprefix(key): t for n, t in tensors.items() if n.startswith(key)}
        expected_keys |= {f"{key}{suffix}" for suffix in layer_tensors}
        shape = layer.get_base_layer().weight.shape
        delta = layer.get_delta_weight("default")
        assert delta.abs().max() > 1e-4
        torch.testing.assert_close(comfyui_delta(layer_tensors, shape), delta)
    assert expected_keys == tensors.keys()


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        ("dora", "comfyui", "nothing reads dora in this form; there are: peft, merged, diffusers"),
        ("oft", "comfyui", "there are: peft, merged"),
        ("loha", "folded", "there are: peft, merged, comfyui"),
        ("lokr", "kohya", "nothing reads lokr"),
    ],
)
def test_a_form_that_reads_no_such_kind_is_refused_by_name(
    kind: AdapterKind, form: Any, words: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trained_adapter = adapter_of(kind, tiny_checkpoints, tmp_path / "adapter")
    with pytest.raises(DitLoraError, match=words):
        export(ExportRequest((trained_adapter.folder,), form, tmp_path / "out", model=str(trained_adapter.base)))
    assert not (tmp_path / "out").exists()


def test_what_is_no_lora_is_neither_weighted_nor_added(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    trained_adapter = adapter_of("lokr", tiny_checkpoints, tmp_path / "one")
    request = ExportRequest(
        (trained_adapter.folder,),
        "diffusers",
        tmp_path / "out",
        (0.5,),
        model=str(trained_adapter.base),
    )
    with pytest.raises(DitLoraError, match=r"only LoRAs can be weighted and added up.*\n.*lokr"):
        export(request)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda n, t: {n.replace("blocks.0", "blocks.7"): t}, r"another model[\s\S]*blocks\.7"),
        (lambda n, t: {n: t[:1]}, r"does not load into Flux2"),
        (lambda n, t: {n: torch.full_like(t, torch.nan)}, r"not finite[\s\S]*lokr"),
        (lambda n, t: {}, r"is not whole[\s\S]*not in the file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    spoil: Any, words: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    trained_adapter = adapter_of("lokr", tiny_checkpoints, tmp_path / "one", rank=1)
    file = written("lokr", trained_adapter.folder)
    tensors = load_file(file)
    name = next(key for key in tensors if "lokr_w1" in key)
    other_tensors = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(other_tensors | spoil(name, tensors[name]), file, {"lora_adapter_metadata": _metadata(file)})
    request = ExportRequest((trained_adapter.folder,), "peft", tmp_path / "out", model=str(trained_adapter.base))
    with pytest.raises((CheckFailedError, DitLoraError), match=words):
        export(request)


def _metadata(file: Path) -> str:
    with safe_open(file, framework="pt") as adapter_file:
        return str(adapter_file.metadata()["lora_adapter_metadata"])
