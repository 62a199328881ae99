"""HunyuanVideo-1.5's own facts: text of two encoders, checkpoints that are refused, ComfyUI's layers, its sizes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import trained
from family_cases.subject import CPU, changed, two_samples
from launching import ROOT
from safetensors.torch import load_file, save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "HunyuanVideo-1.5-Diffusers-480p_t2v"
FAMILY = get_family("hunyuan_video15")


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="hunyuan_video15", path=str(path)))


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["hunyuan-video-1.5"]


def test_text_in_quotes_goes_to_the_second_encoder_too_and_the_end_of_long_captions_is_cut(tiny: Path) -> None:
    encoders = opened(tiny).encoders
    captions = ["a disc", 'a sign, "öpen" and “now”', "a word " * 300, 'a wall of "' + "x" * 300 + '"']
    encoded = encoders.load_text_encoder(torch.float32, CPU)(captions)
    # ByT5 reads bytes, and closes with one token.
    quotes = len('Text "öpen". Text "now". '.encode()) + 1
    assert encoded["prompt_embeds_mask_2"].sum(1).tolist() == [0, quotes, 0, 256]
    assert not encoded["prompt_embeds_2"][[0, 2]].any()
    # The tiny tokenizer has a token a byte, and the template is longer than the 108 that the pipeline drops.
    short, _, long, _ = encoded["prompt_embeds_mask"].sum(1).tolist()
    assert 0 < short < long == 1000
    assert encoders.load_text_limit().max_tokens == 1000
    for name, (size, dtype) in encoders.text_spec(torch.float32).items():
        assert (encoded[name].shape[1:], encoded[name].dtype) == (size, dtype)


def test_samples_of_a_text_and_of_its_tensors_are_the_same(tiny: Path) -> None:
    from_text, from_tensors, batches = two_samples(opened(tiny), VideoShape(5, 32, 48))
    assert from_text.shape == (5, 32, 48, 3)
    assert torch.equal(from_text, from_tensors)
    assert batches == [1, 1, 1, 1]  # the guider's calls


@pytest.mark.parametrize(("name", "warned"), [("480p_t2v_distilled", True), ("480p_t2v", False), ("720p_t2v", False)])
def test_a_run_on_a_distilled_model_starts_with_a_warning(
    tiny: Path, tmp_path: Path, recipe_values: dict[str, Any], name: str, warned: bool
) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / f"HunyuanVideo-1.5-Diffusers-{name}"))
    data = {"path": ".", "frames": 9, "height": 32, "width": 48, "fps": 8}
    values = {**recipe_values, "data": data, "model": {"family": "hunyuan_video15", "path": str(path)}}
    recipe = parse_recipe(values, "test")
    notes = FAMILY.open(recipe.model, recipe).info.recipe_notes(recipe)
    assert [note.startswith("distilled: ") for note in notes] == [True] * warned
    guided = parse_recipe({**values, "train": {**recipe_values["train"], "target": "guided"}}, "test")
    assert not FAMILY.open(guided.model, guided).info.recipe_notes(guided)


def test_checkpoints_of_other_tasks_are_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    config = "transformer/config.json"
    with pytest.raises(DitLoraError, match=r"not a text-to-video checkpoint.*\n  - .*task_type must be t2v; got i2v"):
        opened(changed(tiny, tmp_path / "i2v", config, task_type="i2v"))
    with pytest.raises(DitLoraError, match="use_meanflow must be False; got True"):
        opened(changed(tiny, tmp_path / "few steps", config, use_meanflow=True))
    pipeline = changed(tiny, tmp_path / "image", "model_index.json", _class_name="HunyuanVideo15ImageToVideoPipeline")
    with pytest.raises(DitLoraError, match="is a HunyuanVideo15ImageToVideoPipeline checkpoint; family") as error:
        opened(pipeline)
    assert "\n" not in str(error.value)


def test_comfyuis_form_has_the_layers_of_its_model(tiny: Path, tmp_path: Path) -> None:
    """Query, key and value are one layer there, whose LoRA has three times the rank."""
    every = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("net.0.proj", "net.2", "norm1.linear", "norm1_context.linear"),
    )
    adapter = trained("hunyuan_video15", tiny, tmp_path / "run", alpha=7, targets=every)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    matches = (re.fullmatch(r"diffusion_model\.(.+?)\.(lora_[AB]\.weight|alpha)", name) for name in tensors)
    streams = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
    refiner = ("self_attn.qkv", "self_attn.proj", "mlp.0", "mlp.2")
    assert {match[1] for match in matches if match} == {
        *(f"double_blocks.{i}.{stream}_{layer}" for i in range(2) for stream in ("img", "txt") for layer in streams),
        *(f"txt_in.individual_token_refiner.blocks.0.{layer}" for layer in refiner),
    }
    # Inputs of 16, and outputs of 16 for each of the three.
    assert tensors["diffusion_model.double_blocks.1.txt_attn.qkv.lora_A.weight"].shape == (12, 16)
    assert tensors["diffusion_model.double_blocks.1.txt_attn.qkv.lora_B.weight"].shape == (48, 12)


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, text, text_2 = 16 * config["attention_head_dim"], config["text_embed_dim"], config["text_embed_2_dim"]
    image, square = config["image_embed_dim"], width * (width + 1)
    feed_forward = 8 * width * width + 5 * width
    block = 2 * 6 * square + 8 * square + 4 * config["attention_head_dim"] + 2 * feed_forward
    time = 257 * width + square
    refiner_block = 4 * square + feed_forward + 4 * width + 2 * square
    refiner = time + 2 * (text + 1) * width + square + config["num_refiner_layers"] * refiner_block
    quotes = 2 * text_2 + (text_2 + 1) * 2048 + 2049 * 2048 + 2049 * width
    images = 2 * image + (image + 1) * image + (image + 1) * width + 2 * width
    ends = (config["in_channels"] + 1) * width + 3 * width + 2 * square + (width + 1) * config["out_channels"]
    return int(config["num_layers"] * block + time + refiner + quotes + images + ends)


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Published as 8.3 billion parameters."""
    recipe = load_recipe(ROOT / "recipes" / "hunyuan_video15" / "480p_t2v.yaml")
    assert Path(recipe.model.path).name == CONFIGS.name
    path = Path(shutil.copytree(CONFIGS, tmp_path / CONFIGS.name))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, recipe.lora, FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config)
    assert round(num_parameters / 1e9, 2) == 8.33
    # Four layers of attention in each block, and in the two of the refiner.
    assert (report.num_adapted, report.num_parameters) == (4 * 56, 4 * 56 * 16 * 2 * 2048)
    assert checkpoint.info.size_multiple == 16
    assert not checkpoint.info.find_shape_errors(VideoShape.from_data(recipe.data))
    assert checkpoint.denoiser.objective.shift == 3.0
    licence = FAMILY.get_license(recipe.model.path)
    assert licence is not None
    assert (licence.id, licence.name) == ("other", "tencent-hunyuan-community")
