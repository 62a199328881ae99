"""A LoRA's file acts on the pipeline that it is loaded into, in whichever form it is, or is refused in words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported import Trained, assert_same, deltas, trained
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.adapters.load import load_adapter
from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.export.weight_delta import collect_weight_updates
from dit_lora.families import DIFFUSION_FAMILIES, get_family

Tensors = dict[str, torch.Tensor]


def musubi(one: Trained, *, without: str = "") -> Tensors:
    """An adapter's tensors as musubi-tuner writes them for Wan, but for layers whose name has `without` in it."""
    names, tensors = get_family("wan").comfyui, {}
    for name, (term,) in collect_weight_updates(one.model).items():
        published_name = (names.translate_layer_name(name) or "").removeprefix(names.prefix).replace(".", "_")
        if without and without in published_name:
            continue
        tensors[f"lora_unet_{published_name}.lora_down.weight"] = term.a.contiguous()
        tensors[f"lora_unet_{published_name}.lora_up.weight"] = term.b.contiguous()
        tensors[f"lora_unet_{published_name}.alpha"] = torch.tensor(term.scale * term.rank)
    return tensors


@pytest.fixture
def wan(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Trained:
    targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    return trained("wan", tiny_checkpoints["wan-2.1-t2v"], tmp_path / "run", targets=targets)


def loaded(one: Trained, family: str, file: Path) -> Tensors:
    pipeline = one.checkpoint.sampler.pipeline(torch.float32, text=False)
    load_adapter(pipeline, file, get_family(family).comfyui)
    return deltas(pipeline.transformer)


@pytest.mark.parametrize("lacking", ["self_attn_q", "blocks_0", "ffn"])
def test_musubi_tuners_wan_file_that_lacks_layers_is_loaded(wan: Trained, tmp_path: Path, lacking: str) -> None:
    """The stock loader takes such files whole alone: it fails on the first name that it does not find."""
    save_file(musubi(wan, without=lacking), tmp_path / "theirs.safetensors")
    expected = deltas(wan.model)
    actual = loaded(wan, "wan", tmp_path / "theirs.safetensors")
    assert 0 < len(actual) < len(expected)
    assert_same(actual, {name: expected[name] for name in actual})


def test_verify_says_all_that_the_stock_loader_misses(wan: Trained, tmp_path: Path) -> None:
    tensors = musubi(wan, without="cross_attn_v")
    del tensors["lora_unet_blocks_1_ffn_2.alpha"]
    save_file(tensors, tmp_path / "theirs.safetensors")
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "theirs.safetensors"), "--model", str(wan.base)])
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    listed_names = {line.strip()[2:] for line in result.output.splitlines() if line.strip()[:2] == "- "}
    parts = ("lora_down.weight", "lora_up.weight", "alpha")
    assert listed_names == {
        *(f"lora_unet_blocks_{n}_cross_attn_v.{part}" for n in range(2) for part in parts),
        "lora_unet_blocks_1_ffn_2.alpha",
    }
    assert "WanPipeline does not take the file without these" in result.output
    assert "dit-lora export" in result.output


def test_verify_names_layers_that_the_stock_loader_drops(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers' converter of kohya's FLUX files gives the layers around the blocks names that its loader ignores."""
    base = tiny_checkpoints["flux-dev"]
    targets = ("proj_out", "x_embedder")
    adapter = trained("flux", base, tmp_path / "run", targets=targets)
    tensors = {}
    for name, key in (("proj_out", "final_layer_linear"), ("x_embedder", "img_in")):
        (term,) = collect_weight_updates(adapter.model)[name]
        tensors[f"lora_unet_{key}.lora_down.weight"] = term.a.contiguous()
        tensors[f"lora_unet_{key}.lora_up.weight"] = term.b.contiguous()
        tensors[f"lora_unet_{key}.alpha"] = torch.tensor(term.scale * term.rank)
    save_file(tensors, tmp_path / "theirs.safetensors")
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "theirs.safetensors"), "--model", str(base)])
    assert result.exit_code == 1, result.output
    assert "FluxPipeline does not load these layers as the file has them" in " ".join(result.output.split())
    assert all(f"  - {name}: dropped" in result.output for name in targets)
    expected = deltas(adapter.model)
    actual = loaded(adapter, "flux", tmp_path / "theirs.safetensors")
    assert_same(actual, {name: expected[name] for name in targets})


def comfyui_of(one: Trained) -> Path:
    output_dir = one.folder.parent / "comfyui"
    export(ExportRequest((one.folder,), "comfyui", output_dir, model=str(one.base)))
    (file,) = output_dir.glob("*.safetensors")
    return file


@pytest.mark.parametrize(
    "family",
    [name for name in DIFFUSION_FAMILIES if not get_family(name).comfyui.unsupported_reason],
)
def test_comfyuis_file_acts_on_the_pipeline(tiny_checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    variant = get_family(family).tiny_variants[0]
    adapter = trained(family, tiny_checkpoints[variant], tmp_path / "run")
    assert_same(loaded(adapter, family, comfyui_of(adapter)), deltas(adapter.model))


def test_sample_applies_a_flux_file_of_comfyui(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    adapter = trained("flux", tiny_checkpoints["flux-dev"], tmp_path / "run", scale=1.0)
    shape = ["--height=32", "--width=32", "--frames=1", "--inference-steps=1", "--prompt=a disc"]
    # As SimpleTuner writes it; of such names the stock loader takes none, and warns.
    comfyui_tensors = {}
    for name, (term,) in collect_weight_updates(adapter.model).items():
        comfyui_tensors[f"diffusion_model.{name}.lora_A.weight"] = term.a.contiguous()
        comfyui_tensors[f"diffusion_model.{name}.lora_B.weight"] = term.b.contiguous()
        comfyui_tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(term.scale * term.rank)
    save_file(comfyui_tensors, tmp_path / "theirs.safetensors")
    contents = []
    for file in (adapter.folder / ADAPTER_FILE, tmp_path / "theirs.safetensors"):
        output_dir = tmp_path / file.stem
        args = [str(file), f"--model={adapter.base}", f"--out={output_dir}", *shape]
        result = CliRunner().invoke(app, ["sample", *args])
        assert result.exit_code == 0, result.output
        (picture,) = output_dir.glob("*.png")
        contents.append(picture.read_bytes())
    assert contents[0] == contents[1]


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("transformer_blocks", "layers"): tensor for name, tensor in tensors.items()}


def without_lora(_: Tensors) -> Tensors:
    return {"transformer.proj_out.weight": torch.ones(2)}


@pytest.mark.parametrize("family", ["cogvideox", "flux", "dit"])
@pytest.mark.parametrize("change", [renamed, without_lora])
def test_a_file_of_which_nothing_applies_is_refused(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    family: str,
    change: Callable[[Tensors], Tensors],
) -> None:
    variant = get_family(family).tiny_variants[0]
    adapter = trained(family, tiny_checkpoints[variant], tmp_path / "run")
    for prefix in ("transformer.", "other."):
        tensors = change(load_file(adapter.folder / ADAPTER_FILE))
        tensors = {n.replace("transformer.", prefix, 1): t for n, t in tensors.items()}
        save_file(tensors, tmp_path / "theirs.safetensors")
        with pytest.raises(DitLoraError, match=r"theirs\.safetensors"):
            loaded(adapter, family, tmp_path / "theirs.safetensors")


def test_layers_that_the_model_lacks_are_all_named(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers warns of them and loads the others."""
    adapter = trained("flux", tiny_checkpoints["flux-dev"], tmp_path / "run")
    tensors = load_file(adapter.folder / ADAPTER_FILE)
    for layer in ("gone.0", "gone.1"):
        tensors[f"transformer.{layer}.lora_A.weight"] = torch.ones(4, 8)
        tensors[f"transformer.{layer}.lora_B.weight"] = torch.ones(8, 4)
    save_file(tensors, tmp_path / "theirs.safetensors")
    with pytest.raises(DitLoraError, match=r"the model does not have these layers\n  - gone\.0\n  - gone\.1$"):
        loaded(adapter, "flux", tmp_path / "theirs.safetensors")
