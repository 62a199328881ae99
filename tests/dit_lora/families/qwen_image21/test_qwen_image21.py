"""Qwen-Image 2.1's own facts: a forward that reads no values, RGBA, cut captions, Turbo's steps, published sizes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from family_cases import qwen_image21
from family_cases.subject import CPU, changed, encoded_batch, open_subject, pixels_of, two_samples
from launching import ROOT
from PIL import Image
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.latents import VaeMemory
from dit_lora.families.qwen_image21.text import MAX_TEXT_TOKENS, load_processor
from dit_lora.families.without_weights import build_from_configs
from dit_lora.numerics.streams import RandomStreams

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Qwen-Image-2.1"
FAMILY = get_family("qwen_image21")
(CASE,) = qwen_image21.CASES


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="qwen_image21", path=str(path)))


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["qwen-image-2.1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_of_the_pipeline_without_its_cache_is_one_prediction(tiny: Path, dtype: torch.dtype) -> None:
    """Bit for bit, whatever the sample's neighbour; in bf16 the timestep's rounding shows."""
    checkpoint = opened(tiny)
    text = checkpoint.encoders.load_text_encoder(dtype, CPU)([CASE.captions[0], CASE.captions[2]])
    pipeline = checkpoint.sampler.pipeline(dtype, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    arguments = checkpoint.sampler.prompt_kwargs({name: tensor[:1] for name, tensor in text.items()})
    pipeline(**arguments, height=64, width=96, num_inference_steps=3, use_kv_cache=False, output_type="latent")
    assert len(calls) == 3
    batch = {**text, "latent_mean": torch.empty(2, 64, 1, 4, 6)}
    transformer = checkpoint.denoiser.load_transformer(dtype).eval()
    for call, output in calls:
        timesteps = (call["timestep"].double() * 1000).to(dtype).float()
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(
                transformer, call["hidden_states"].expand(2, -1, -1), timesteps.expand(2), batch
            )
        assert torch.equal(prediction[:1], output[:, -24:])
        assert not torch.equal(prediction[1:], output[:, -24:])


def test_the_forward_from_shapes_has_the_gradients_of_diffusers_forward(tiny: Path) -> None:
    subject = open_subject(CASE, tiny)
    batch, gradients = encoded_batch(subject), []
    for replaced in (True, False):
        transformer: Any = subject.checkpoint.denoiser.load_transformer(torch.float32)
        if not replaced:
            del transformer.forward
            assert transformer.forward.__func__ is QwenImage21Transformer2DModel.forward
        attach_lora(transformer, LoraConfig(rank=4, init="gaussian"), FAMILY.lora_targets, seed=0)
        transformer.requires_grad_(True)
        losses = subject.checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2])).losses
        losses.sum().backward()
        gradients.append({n: p.grad for n, p in transformer.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_call_needs_no_values_of_its_tensors(tiny: Path) -> None:
    """On the meta device there are none; Diffusers' forward asks for them."""
    checkpoint = opened(tiny)
    with torch.device("meta"), build_from_configs():
        transformer: Any = checkpoint.denoiser.load_transformer(torch.float32)
        latents, mask = torch.empty(2, 64, 1, 4, 6), torch.ones(2, 9, dtype=torch.bool, device="cpu")
        batch = {"prompt_embeds": torch.empty(2, 9, 48), "prompt_mask": mask, "latent_mean": latents}
        noisy, timesteps = torch.empty(2, 24, 64), torch.empty(2)
    assert checkpoint.denoiser.predict(transformer, noisy, timesteps, batch).shape == (2, 24, 64)
    del transformer.forward
    with pytest.raises(RuntimeError, match="meta"):
        checkpoint.denoiser.predict(transformer, noisy, timesteps, batch)


def test_a_causal_condition_is_the_checkpoints_choice(tiny: Path, tmp_path: Path) -> None:
    """Without it, text is modulated at the image's timestep, and the pipeline has no cache."""
    path = changed(tiny, tmp_path / "plain", "transformer/config.json", causal_condition=False)
    subject = open_subject(CASE, path)
    batch = encoded_batch(subject)
    transformer: Any = subject.checkpoint.denoiser.load_transformer(torch.float32)
    streams = RandomStreams(0, [0, 1, 2])
    with torch.no_grad():
        ours = subject.checkpoint.denoiser.losses(transformer, batch, streams).losses
        del transformer.forward
        assert torch.equal(ours, subject.checkpoint.denoiser.losses(transformer, batch, streams).losses)


def test_images_are_encoded_as_the_pipeline_encodes_an_opaque_one(tiny: Path) -> None:
    checkpoint = opened(tiny)
    pixels = pixels_of(VideoShape(1, 64, 96), torch.Generator().manual_seed(0))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).convert("RGBA")
    values = pipeline.image_processor.preprocess(picture).unsqueeze(2)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(values, None)
    batch = {n: t[None] for n, t in checkpoint.encoders.load_video_encoder(torch.float32, CPU)(pixels).items()}
    clean = checkpoint.denoiser.clean_latents(batch, {"posterior": torch.zeros_like(batch["latent_mean"])})
    torch.testing.assert_close(clean, expected.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_samples_of_a_text_and_of_its_tensors_are_the_same_picture_without_transparency(tiny: Path) -> None:
    from_text, from_tensors, batches = two_samples(opened(tiny), VideoShape(1, 64, 96))
    assert from_text.shape == (1, 64, 96, 3)
    assert torch.equal(from_text, from_tensors)
    assert batches == [1, 1, 1, 1]  # guidance is a second call


def test_a_long_caption_loses_its_end_and_the_templates_stays(tiny: Path) -> None:
    """A prompt of a sample too, whatever its neighbours."""
    cut = load_processor(tiny)
    whole = load_processor(tiny)
    whole.max_tokens = None
    (template,) = {opened(tiny).encoders.text_cache_key()["template"]}
    prompts = [template.format(text) for text in ("a disc " * 90, "a disc", "a square " * 90)]
    keywords: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    both = cut(text=prompts, **keywords)
    assert cut.max_tokens is not None
    assert both.input_ids.shape == both.attention_mask.shape == (3, cut.max_tokens)
    for row, prompt in enumerate(prompts):
        (ids,) = whole(text=[prompt], **keywords).input_ids
        row_ids = both.input_ids[row][both.attention_mask[row].bool()]
        assert torch.equal(row_ids[:-5], ids[: len(row_ids) - 5])
        assert torch.equal(row_ids[-5:], ids[-5:])
        assert len(row_ids) == min(len(ids), cut.max_tokens)
    assert cut.tokenizer.decode(both.input_ids[0, -5:]) == "<|im_end|>\n<|im_start|>assistant\n"
    encode = opened(tiny).encoders.load_text_encoder(torch.float32, CPU)
    assert int(encode(["a disc " * 90])["prompt_mask"].sum()) == MAX_TEXT_TOKENS


SIGMAS = [1.0, 0.9, 0.5]


@pytest.mark.parametrize("steps", [2, 3])
def test_turbos_steps_are_its_own_only_at_their_number(tiny: Path, tmp_path: Path, steps: int) -> None:
    """The pipeline takes its checkpoint's noise levels whatever number of steps it is told."""
    path = changed(tiny, tmp_path / "turbo", "model_index.json", sample_sigmas=SIGMAS)
    path = changed(
        path, tmp_path / "static", "scheduler/scheduler_config.json", use_dynamic_shifting=False, shift_terminal=None
    )
    checkpoint = opened(path)
    assert checkpoint.denoiser.objective.shift == 1.0
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    seen: list[float] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _m, _args, kwargs: seen.append(round(float(kwargs["timestep"][0]), 3)), with_kwargs=True
    )
    sampling = Sampling(VideoShape(1, 32, 32), steps, guidance_scale=1.0, seed=0)
    checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
    assert seen == (SIGMAS if steps == 3 else [1.0, 0.5])


@pytest.mark.parametrize(("sigmas", "warned"), [(SIGMAS, True), (None, False)])
def test_a_run_on_turbo_starts_with_a_warning(
    tiny: Path, tmp_path: Path, recipe_values: dict[str, Any], sigmas: Any, warned: bool
) -> None:
    path = changed(tiny, tmp_path / "other", "model_index.json", sample_sigmas=sigmas)
    values = {"data": {"path": ".", "height": 64, "width": 96}, "model": {"family": "qwen_image21", "path": str(path)}}
    recipe = parse_recipe({**recipe_values, **values}, "test")
    checkpoint = FAMILY.open(recipe.model, recipe)
    notes = checkpoint.info.recipe_notes(recipe)
    assert any("is sampled in 3 steps of its own" in note for note in notes) == warned
    train = {**recipe_values["train"], "target": "guided"}
    assert not checkpoint.info.recipe_notes(parse_recipe({**recipe_values, **values, "train": train}, "test"))


def test_tiles_of_its_autoencoder_are_of_rgba(tiny: Path) -> None:
    """Convolutions of two dimensions, and a dimension of frames."""
    config, tiling = opened(tiny).info.vae_config, VaeMemory(tiling=True, slicing=True)
    tiling.require_tiling_support("it", config, [(512, 512)])
    with pytest.raises(DitLoraError, match="do not fit these heights"):
        tiling.require_tiling_support("it", config, [(520, 512)])


def test_parts_that_do_not_fit_and_a_missing_processor_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"in_channels must be 64, of 1x1 latents .* got 16"):
        opened(changed(tiny, tmp_path / "channels", "transformer/config.json", in_channels=16))
    shutil.rmtree(tmp_path / "channels" / "processor")
    with pytest.raises(DitLoraError, match="processor does not exist"):
        load_processor(tmp_path / "channels")


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    block = (4 + 3 * config["mlp_ratio"]) * width * width + 2 * config["attention_head_dim"]
    time = (256 + width) * width
    text = config["context_in_dim"] * (1 + width) + width * width
    ends = (config["in_channels"] + config["out_channels"]) * width + width * width
    return config["num_layers"] * block + time + text + 4 * width * width + ends


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Published as 7 billion parameters."""
    recipe = load_recipe(ROOT / "recipes" / "qwen_image21" / "base.yaml")
    assert recipe.model.path == "Qwen/Qwen-Image-2.1"
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Qwen-Image-2.1"))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, LoraConfig(rank=16), FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config) == 7_115_124_736
    assert (report.num_adapted, report.num_parameters) == (128, 16_777_216)
    assert checkpoint.info.size_multiple == 32
    # The line through 256 and 8192 tokens, at a token for 16x16 pixels.
    assert checkpoint.denoiser.compute_shift_mu(torch.Size([64, 1, 64, 64])) == pytest.approx(
        0.5 + 0.4 * (4096 - 256) / 7936
    )
