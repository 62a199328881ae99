"""Ideogram 4's own facts: cached prompts, the transformer for guidance, noise levels, truncation, ComfyUI's layers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Ideogram4Pipeline
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4MRoPE
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu
from exported import assert_same, deltas, trained
from family_cases.subject import CPU, changed
from launching import ROOT
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.ideogram4.text import MAX_TEXT_TOKENS

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Ideogram-4-bf16-Diffusers"
FAMILY = get_family("ideogram4")
SHAPE = VideoShape(1, 64, 96)
CAPTION = json.dumps({"high_level_description": "a red disc", "compositional_deconstruction": {"background": "dark"}})


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="ideogram4", path=str(path)))


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["ideogram-4"]


def sampled(pipeline: Any, **arguments: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return pipeline(height=64, width=96, num_inference_steps=3, generator=generator, output_type="pt", **arguments)[0]


def test_a_sample_of_cached_embeddings_is_the_stock_pipelines(tiny: Path) -> None:
    """Bitwise where the stock pipeline pads no caption; what it pads changes rounding alone."""
    checkpoint, guidance = opened(tiny), {"guidance_scale": 4.0, "guidance_schedule": None}
    pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    assert pipeline.text_encoder is None
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)([CAPTION])
    num_tokens = int(encoded["prompt_attention_mask"].sum())
    cached = sampled(pipeline, **checkpoint.sampler.prompt_kwargs(encoded), **guidance)
    stock = Ideogram4Pipeline.from_pretrained(tiny)
    unpadded = sampled(stock, prompt=CAPTION, max_sequence_length=num_tokens, **guidance)
    assert torch.equal(cached, unpadded)
    padded = sampled(stock, prompt=CAPTION, **guidance)
    torch.testing.assert_close(cached, padded, rtol=0, atol=1e-4)
    assert (cached - sampled(stock, prompt="", **guidance)).abs().max() > 0.01
    # A text is encoded by the same pipeline as well.
    texts = checkpoint.sampler.pipeline(torch.float32)
    assert torch.equal(sampled(texts, **checkpoint.sampler.prompt_kwargs(CAPTION), **guidance), cached)


def test_autocast_leaves_neighbouring_pixels_apart(tiny: Path) -> None:
    """An image's positions begin at 65536. In bf16, up to 512 of them in a row would be one."""
    denoiser = opened(tiny).denoiser
    transformer = denoiser.load_transformer(torch.float32)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "latent_mean": torch.zeros(1, 4, 8, 12),
        "prompt_embeds": torch.randn(1, 5, 208, generator=generator),
        "prompt_attention_mask": torch.ones(1, 5, dtype=torch.bool),
    }
    noisy, timesteps = torch.randn(1, 24, 16, generator=generator), torch.tensor([500.0])
    with torch.no_grad():
        exact = denoiser.predict(transformer, noisy, timesteps, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = denoiser.predict(transformer, noisy, timesteps, batch).float()
        transformer.rotary_emb.forward = lambda ids: Ideogram4MRoPE.forward(transformer.rotary_emb, ids // 512 * 512)
        collapsed = denoiser.predict(transformer, noisy, timesteps, batch)
    assert (rounded - exact).norm() < 0.03 * exact.norm()
    assert (collapsed - exact).norm() > 2 * (rounded - exact).norm()


def test_guidance_compares_with_the_other_transformer(tiny: Path) -> None:
    """Which has no adapter, and sees no text."""
    checkpoint = opened(tiny)
    pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.set_progress_bar_config(disable=True)
    text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(["a red disc"])
    lengths: list[int] = []
    pipeline.unconditional_transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["encoder_hidden_states"].count_nonzero().item()),
        with_kwargs=True,
    )
    arguments = checkpoint.sampler.prompt_kwargs(text, text)
    pictures = [
        checkpoint.sampler.generate(pipeline, arguments, Sampling(SHAPE, 2, guidance, seed=0)).float()
        for guidance in (1.0, 1.0, 4.0)
    ]
    assert lengths == [0] * 6
    assert torch.equal(pictures[0], pictures[1])
    assert (pictures[0] - pictures[2]).abs().max() > 5


@pytest.mark.parametrize("shape", [SHAPE, VideoShape(1, 1024, 1024), VideoShape(1, 2048, 1536)])
def test_noise_levels_are_those_that_the_pipeline_samples_at(tiny: Path, shape: VideoShape) -> None:
    """Its levels at N steps are the N-quantiles of what training draws."""
    denoiser = opened(tiny).denoiser
    shift = denoiser.compute_shift(torch.Size([4, shape.height // 8, shape.width // 8]))
    quantiles = torch.special.ndtri(torch.linspace(0, 1, 51, dtype=torch.float64)[1:-1])
    drawn = denoiser.objective.compute_sigmas(quantiles, shift)
    sampled_at = _logit_normal_sigmas(50, _resolution_aware_mu(shape.height, shape.width, 0.0), std=1.5)
    torch.testing.assert_close(drawn.flip(0).float(), sampled_at[1:], rtol=1e-5, atol=0)
    assert shape.height != 1024 or abs(shift - 2) < 1e-6


def test_the_end_of_a_long_caption_is_cut_but_not_the_templates(tiny: Path) -> None:
    """Diffusers' pipeline would refuse it."""
    checkpoint, long = opened(tiny), "a red disc " * 100
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encoded = encode([long])
    assert encoded["prompt_attention_mask"].all()
    limit = checkpoint.encoders.load_text_limit()
    cut = limit.tokenizer.decode(limit.tokenizer(long).input_ids[: limit.max_tokens])
    assert torch.equal(encode([cut])["prompt_embeds"], encoded["prompt_embeds"])
    # For samples too, and a character of two tokens is not cut in half.
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    split = "a" * (limit.max_tokens - 1) + "é" * 9
    assert torch.equal(pipeline.embed_caption(long), encoded["prompt_embeds"][0])
    assert torch.equal(pipeline.embed_caption(split), pipeline.embed_caption("a" * (limit.max_tokens - 1)))
    with pytest.raises(ValueError, match="exceeds max_sequence_length"):
        Ideogram4Pipeline.from_pretrained(tiny, vae=None).encode_prompt(long, 1, 1, MAX_TEXT_TOKENS, CPU)


def test_captions_are_encoded_without_either_transformer(tiny: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "text-only"))
    for name in ("transformer", "unconditional_transformer", "vae"):
        (path / name / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    encoders = opened(tiny).encoders
    object.__setattr__(encoders.info, "path", path)
    assert encoders.load_text_encoder(torch.float32, CPU)(["a cat"])["prompt_embeds"].any()


def test_what_cannot_be_trained_is_refused(tiny: Path, tmp_path: Path, recipe_values: dict[str, Any]) -> None:
    quantized = changed(
        tiny, tmp_path / "nf4", "transformer/config.json", quantization_config={"quant_method": "bitsandbytes"}
    )
    published = Path(shutil.copytree(tiny, tmp_path / "fp8"))
    file = published / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name.replace("to_q", "qkv"): tensor for name, tensor in load_file(file).items()}, file)
    for path in (quantized, published):
        with pytest.raises(DitLoraError, match=r"is Ideogram's fp8 or nf4.*; give a copy in 16 bits"):
            opened(path)
    dynamic = changed(tiny, tmp_path / "dynamic", "scheduler/scheduler_config.json", use_dynamic_shifting=True)
    with pytest.raises(DitLoraError, match="use_dynamic_shifting"):
        opened(dynamic)
    incomplete = Path(shutil.copytree(tiny, tmp_path / "incomplete"))
    (incomplete / "unconditional_transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(DitLoraError, match=r"unconditional_transformer: no .safetensors file"):
        opened(incomplete)
    values = {"data": {"path": ".", "height": 64, "width": 96}, "model": {"family": "ideogram4", "path": str(tiny)}}
    train = {**recipe_values["train"], "target": "guided"}
    recipe = parse_recipe({**recipe_values, **values, "train": train}, "test")
    with pytest.raises(DitLoraError, match="unconditional transformer, which is not loaded in training"):
        FAMILY.open(recipe.model, recipe)


def test_empty_captions_get_a_note(tiny: Path, recipe_values: dict[str, Any]) -> None:
    model = {"family": "ideogram4", "path": str(tiny)}
    for dropout, is_noted in ((0.0, False), (0.1, True)):
        data = {"path": ".", "height": 64, "width": 96, "caption_dropout": dropout}
        recipe = parse_recipe({**recipe_values, "data": data, "model": model}, "test")
        notes = FAMILY.open(recipe.model, recipe).info.recipe_notes(recipe)
        assert any("never sampled with an empty caption" in note for note in notes) == is_noted


def test_stock_diffusers_reads_what_comfyui_does(tiny: Path, tmp_path: Path) -> None:
    """Query, key and value are one layer of the published model, whose LoRA has three times the rank."""
    every = (*FAMILY.lora_targets, "layers.0.adaln_modulation", "layers.1.adaln_modulation")
    adapter = trained("ideogram4", tiny, tmp_path / "run", alpha=7, targets=every)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    layers = {re.fullmatch(r"diffusion_model\.(.+?)\.(lora_[AB]\.weight|alpha)", name)[1] for name in tensors}
    parts = ("attention.qkv", "attention.o", *(f"feed_forward.w{i}" for i in (1, 2, 3)), "adaln_modulation")
    assert layers == {f"layers.{i}.{part}" for i in range(2) for part in parts}
    assert tensors["diffusion_model.layers.0.attention.qkv.lora_A.weight"].shape == (12, 32)
    assert tensors["diffusion_model.layers.0.attention.qkv.lora_B.weight"].shape == (96, 12)
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = Ideogram4Pipeline.from_pretrained(tiny, vae=None, text_encoder=None, tokenizer=None)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    expected = deltas(adapter.model)
    assert len(expected) == 2 * 8
    assert_same(deltas(pipeline.transformer), expected)
    assert not any(isinstance(module, LoraLayer) for module in pipeline.unconditional_transformer.modules())


def test_comfyuis_form_needs_all_layers_that_it_joins(tiny: Path, tmp_path: Path) -> None:
    adapter = trained("ideogram4", tiny, tmp_path / "run", targets=("to_q", "to_v", "w1"))
    with pytest.raises(DitLoraError, match=r"joins these layers .*\n  - layers.0.attention.to_k"):
        export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, low = config["attention_head_dim"] * config["num_attention_heads"], config["adaln_dim"]
    layer = 4 * width * width + 3 * width * config["intermediate_size"] + 4 * width + 2 * 256 + (low + 1) * 4 * width
    text = config["llm_features_dim"] * (width + 1) + width
    time = 2 * (width + 1) * width + (width + 1) * low
    ends = 129 * width + 2 * width + (width + 1) * 128 + (low + 1) * width
    return int(config["num_layers"] * layer + text + time + ends)


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Its authors speak of 9.3 billion parameters."""
    recipe = load_recipe(ROOT / "recipes" / "ideogram4" / "base.yaml")
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Ideogram-4"))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, LoraConfig(rank=16), FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config)
    assert round(num_parameters / 1e9, 2) == 9.28
    assert (report.num_adapted, report.num_parameters) == (7 * 34, 47_628_288)
    assert checkpoint.denoiser.objective.shift is None
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    assert sum(size.numel() * dtype.itemsize for size, dtype in spec.values()) == 1024 * (2 * 13 * 4096 + 1)
    licence = FAMILY.get_license(recipe.model.path)
    assert licence is not None
    assert (licence.id, licence.name) == ("other", "ideogram-4-non-commercial")
