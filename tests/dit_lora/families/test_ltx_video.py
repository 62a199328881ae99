"""LTX-Video: frames per second, text, shift, timestep and noise of its decoder, and the given first frame."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline
from exported import assert_same, deltas, trained
from family_cases.subject import (
    CPU,
    EVERY,
    changed,
    encoded_batch,
    open_subject,
    pixels_of,
    two_samples,
)
from safetensors.torch import load_file, save_file

from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.pictures import to_pil_image
from dit_lora.numerics.objectives import compute_mean_squared_error
from dit_lora.numerics.streams import RandomStreams

FAMILY = get_family("ltx_video")
SHAPE = VideoShape(9, 64, 96)
every_variant = pytest.mark.parametrize("variant", FAMILY.tiny_variants)


def opened(path: Path, task: Any = None) -> Any:
    return FAMILY.open(ModelConfig(family="ltx_video", path=str(path), task=task))


def recipe_of(path: Path, values: dict[str, Any], task: Any = None, **sections: Any) -> Recipe:
    model = {"family": "ltx_video", "path": str(path), "task": task}
    data = {"path": ".", "frames": 9, "height": 64, "width": 96, "fps": 12.5}
    data |= sections.pop("data", {})
    return parse_recipe({**values, "model": model, "data": data, **sections}, "test")


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_frames_a_second_are_told_in_training_as_in_sampling(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any], tmp_path: Path, task: str
) -> None:
    """The recipe's, or a header's; otherwise the pipeline's default. Other positions give other predictions."""
    path = tiny_checkpoints["ltx-video"]
    recipe = recipe_of(path, recipe_values, task)
    plain = opened(path, task)
    informed = plain.apply_recipe(recipe)
    assert (plain.info.frame_rate, informed.info.frame_rate) == (25, 12.5)
    assert plain.copy_with_training_metadata({"video": {"fps": 12.5}}) == informed
    case = EVERY["ltx-video" if task == "t2v" else "ltx-video-i2v"]
    pixels, image = pixels_of(SHAPE, torch.Generator().manual_seed(3)), None
    if case.pictures:
        image = tmp_path / "first.png"
        to_pil_image(pixels[0]).save(image)
    row = informed.encoders.load_video_encoder(torch.float32, CPU)(pixels)
    text = informed.encoders.load_text_encoder(torch.float32, CPU)(["a cat"])
    batch = case.as_sampled({name: tensor[None] for name, tensor in row.items()} | text, 4)
    pipeline, calls = quiet(informed.sampler.pipeline(torch.float32)), []
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    sampling = Sampling(SHAPE, 2, 1.0, seed=4, image=image, fps=12.5)
    informed.sampler.generate(pipeline, informed.sampler.prompt_kwargs(text), sampling)
    call, expected = calls[-1]
    assert call["rope_interpolation_scale"] == (8 / 12.5, 32, 32)
    transformer, timesteps = informed.denoiser.load_transformer(torch.float32).eval(), case.timesteps(call)
    with torch.no_grad():
        prediction, other_prediction = (
            opened_checkpoint.denoiser.predict(transformer, call["hidden_states"], timesteps, batch)
            for opened_checkpoint in (informed, plain)
        )
    assert torch.equal(prediction, expected)
    assert (other_prediction - prediction).abs().max() > 1e-3


@every_variant
def test_captions_are_encoded_as_the_pipeline_does_whatever_their_neighbours(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """T5 sees the pads; the mask keeps them from the transformer."""
    path = tiny_checkpoints[variant]
    checkpoint, pipeline = opened(path), LTXPipeline.from_pretrained(path)
    captions = ["A Red cat on\na mat", "", "fish, " * 60]
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(captions)
    spec = checkpoint.encoders.text_spec(torch.float32)
    assert {n: (t.shape[1:], t.dtype) for n, t in encoded.items()} == spec
    for row, caption in enumerate(captions):
        with torch.no_grad():
            embeds, mask, _, _ = pipeline.encode_prompt(caption)
        assert torch.equal(encoded["prompt_embeds"][row], embeds[0])
        assert torch.equal(encoded["prompt_attention_mask"][row], mask[0])
    assert encoded["prompt_attention_mask"].sum(1).tolist()[1:] == [1, 128]
    assert checkpoint.encoders.text_cache_key()["tokens"] == 128


@every_variant
def test_the_shift_is_the_pipelines_at_five_sizes(
    tiny_checkpoints: dict[str, Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint, pipeline, recorded = opened(path), LTXPipeline.from_pretrained(path), []

    class StopHereError(Exception):
        pass

    def set_timesteps(sigmas: Any, device: Any, mu: float) -> None:
        recorded.append(mu)
        raise StopHereError

    monkeypatch.setattr(pipeline.scheduler, "set_timesteps", set_timesteps)
    for step in range(1, 6):
        frames, height, width = 8 * step + 1, 64 * step, 96
        with pytest.raises(StopHereError):
            pipeline("a cat", **checkpoint.sampler.shape_kwargs(VideoShape(frames, height, width)))
        size = torch.Size([8, step + 1, 2 * step, 3])
        assert checkpoint.denoiser.compute_shift_mu(size) == recorded[-1]
        # The line through (1024, 0.95) and (4096, 2.05).
        line = 0.95 + (6 * step * (step + 1) - 1024) * 1.1 / 3072
        assert checkpoint.denoiser.compute_shift(size) == pytest.approx(math.exp(line))
    assert len(set(recorded)) == 5


def test_a_decoder_that_draws_noise_makes_one_video_of_a_seed(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """0.9.1's, which is told a timestep too; what it draws is taken from nobody else."""
    older, newer = (opened(tiny_checkpoints[variant]) for variant in FAMILY.tiny_variants)
    decoding = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    added_options = newer.sampler.shape_kwargs(SHAPE).items() - older.sampler.shape_kwargs(SHAPE).items()
    assert dict(added_options) == decoding
    pipeline = quiet(newer.sampler.pipeline(torch.float32))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    videos = []
    for seed in (3, 3, 4):
        sampling = Sampling(SHAPE, inference_steps=2, guidance_scale=1.0, seed=seed)
        videos.append(newer.sampler.generate(pipeline, newer.sampler.prompt_kwargs("a cat"), sampling))
        torch.randn(5)  # somebody else draws
    assert videos[0].shape == (9, 64, 96, 3)
    assert torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[0], videos[2])
    torch.set_rng_state(state)
    sampling = Sampling(SHAPE, inference_steps=2, guidance_scale=1.0, seed=3)
    newer.sampler.generate(pipeline, newer.sampler.prompt_kwargs("a cat"), sampling)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_step_is_refused_of_which_its_scheduler_makes_nan(
    tiny_checkpoints: dict[str, Path],
) -> None:
    checkpoint = opened(tiny_checkpoints["ltx-video"])
    pipeline = quiet(checkpoint.sampler.pipeline(torch.float32))
    with pytest.raises(IndexError):  # the stock pipeline, which looks for a level among NaN
        pipeline("a cat", **checkpoint.sampler.shape_kwargs(SHAPE), num_inference_steps=1)
    sampling = Sampling(SHAPE, inference_steps=1, guidance_scale=3.0, seed=3)
    with pytest.raises(DitLoraError, match=r"ltx-video: inference steps must be 2 or more, .*0\.1"):
        checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)


@every_variant
def test_guidance_from_cached_text_equals_guidance_from_words(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = opened(tiny_checkpoints[variant])
    texts, tensors, batches = two_samples(checkpoint, SHAPE)
    assert batches == [checkpoint.sampler.guidance_batch_size] * 2
    assert texts.float().std() > 1
    assert torch.equal(texts, tensors)


def test_clips_are_encoded_in_fp32_with_what_normalises_them(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["ltx-video"]
    pixels = pixels_of(SHAPE, torch.Generator().manual_seed(2))
    encoded = opened(path, "i2v").encoders.load_video_encoder(torch.bfloat16, CPU)(pixels)
    assert {tensor.dtype for tensor in encoded.values()} == {torch.float32}
    vae = AutoencoderKLLTXVideo.from_pretrained(path, subfolder="vae")
    assert torch.equal(encoded["latent_statistics"], torch.stack([vae.latents_mean, vae.latents_std]))
    with torch.no_grad():
        video = (pixels.float() / 127.5 - 1).transpose(0, 1)[None]
        full_posterior, first_posterior = (vae.encode(frames).latent_dist for frames in (video, video[:, :, :1]))
    assert torch.equal(encoded["latent_mean"], full_posterior.mean[0])
    torch.testing.assert_close(encoded["image_latent_mean"], first_posterior.mean[0], rtol=1e-5, atol=1e-5)
    # The encoder is causal: a clip's first latent is its first frame's.
    torch.testing.assert_close(encoded["image_latent_mean"][:, 0], full_posterior.mean[0, :, 0])


def test_an_image_of_the_clips_own_is_what_stands_in_front(
    tiny_checkpoints: dict[str, Path],
) -> None:
    encode = opened(tiny_checkpoints["ltx-video"], "i2v").encoders.load_video_encoder(torch.float32, CPU)
    clip_pixels, image_pixels = (pixels_of(SHAPE, torch.Generator().manual_seed(n)) for n in (1, 2))
    own_encoding, expected = encode(clip_pixels, image_pixels[0]), encode(image_pixels)
    for name, tensor in encode(clip_pixels).items():
        if name != "latent_statistics":
            of_image = name.startswith("image_")
            assert torch.equal(own_encoding[name], expected[name]) == of_image, name
            assert torch.equal(own_encoding[name], tensor) != of_image, name


def test_samples_without_their_image_are_trained_as_text_to_video(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any]
) -> None:
    """A share of the draws, `data.image_dropout`, has the loss of the task t2v, over all frames."""
    path = tiny_checkpoints["ltx-video"]
    batch = encoded_batch(open_subject(EVERY["ltx-video-i2v"], path))
    transformer = opened(path).denoiser.load_transformer(torch.float32)

    def losses(checkpoint: Any) -> torch.Tensor:
        with torch.no_grad():
            return checkpoint.denoiser.losses(transformer, batch, RandomStreams(6, [0, 1, 2])).losses

    def dropping(share: float) -> Any:
        recipe = recipe_of(path, recipe_values, "i2v", data={"image_dropout": share})
        return opened(path, "i2v").apply_recipe(recipe)

    never, always = losses(dropping(0.0)), losses(dropping(1.0))
    text = losses(opened(path).apply_recipe(recipe_of(path, recipe_values)))
    torch.testing.assert_close(always, text, rtol=1e-5, atol=0)
    assert (never - text).abs().min() > 1e-3
    half = dropping(0.5)
    keep_mask = RandomStreams(6, [0, 1, 2]).draw_random_tensors(half.get_random_input_samplers(batch), CPU)[
        "image_dropout"
    ]
    assert keep_mask.any()
    assert not keep_mask.all()
    torch.testing.assert_close(losses(half), torch.where(keep_mask, never, text), rtol=1e-5, atol=0)


def test_no_loss_is_taken_where_the_image_stands(tiny_checkpoints: dict[str, Path]) -> None:
    """Neither does the clip's own first frame matter there, nor the noise."""
    path = tiny_checkpoints["ltx-video"]
    checkpoint = opened(path, "i2v")
    batch = encoded_batch(open_subject(EVERY["ltx-video-i2v"], path))
    batch["image_latent_logvar"].fill_(-60)  # so that what is drawn is the mean
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    streams = RandomStreams(5, [0, 1, 2])
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    tokens = 2 * 3  # of a frame
    with torch.no_grad():
        before = checkpoint.denoiser.losses(transformer, batch, streams).losses
        clean = checkpoint.denoiser.clean_latents(batch, random_inputs)
        noisy = checkpoint.denoiser.objective.add_noise(clean, random_inputs["noise"], random_inputs["timestep"])
        velocity = checkpoint.denoiser.predict(transformer, noisy, 1000 * random_inputs["timestep"], batch)
        behind = (tensor[:, tokens:] for tensor in (velocity, random_inputs["noise"] - clean))
        torch.testing.assert_close(compute_mean_squared_error(*behind), before, rtol=1e-6, atol=0)
        batch["latent_mean"][:, :, 0] += 1
        assert torch.equal(checkpoint.denoiser.losses(transformer, batch, streams).losses, before)
        batch["image_latent_mean"] += 1
        assert (checkpoint.denoiser.losses(transformer, batch, streams).losses != before).all()


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        (
            "model_index.json",
            {"_class_name": "LTXConditionPipeline"},
            "a LTXConditionPipeline checkpoint; family ltx_video trains LTXPipeline and LTXImage",
        ),
        (
            "transformer/config.json",
            {"patch_size": 2, "in_channels": 32},
            r"in_channels must be 8; got 32\n.*patch_size must be 1; got 2",
        ),
        (
            "scheduler/scheduler_config.json",
            {"_class_name": "UniPCMultistepScheduler"},
            "scheduler UniPCMultistepScheduler is not the one",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    file: str,
    values: dict[str, Any],
    words: str,
) -> None:
    path = changed(tiny_checkpoints["ltx-video"], tmp_path / "m", file, **values)
    with pytest.raises(DitLoraError, match=words):
        opened(path)


@pytest.mark.parametrize(
    ("task", "sections", "words"),
    [
        (None, {"data": {"image_dropout": 0.1}}, "data.image_dropout: family ltx_video"),
        (None, {"data": {"image_column": "first"}}, "data.image_column: family ltx_video"),
        ("i2v", {"validation": {"prompts": ["a"]}}, "one first image for each prompt; got 0 for 1"),
        ("i2v", {"data": {"frames": 1, "fps": None}}, "frames must be 9 or more"),
        (None, {"train": {"guidance_scale": 1.0}}, "train.guidance_scale: family ltx_video"),
    ],
)
def test_a_recipe_that_it_cannot_train_is_refused(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    task: str | None,
    sections: dict[str, Any],
    words: str,
) -> None:
    path = tiny_checkpoints["ltx-video"]
    sections = {
        name: {**recipe_values.get(name, {}), **section} if name != "data" else section
        for name, section in sections.items()
    }
    with pytest.raises(DitLoraError, match=words):
        opened(path, task).apply_recipe(recipe_of(path, recipe_values, task, **sections))


@pytest.mark.parametrize("outside", [False, True])
def test_stock_diffusers_reads_what_comfyui_does(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, outside: bool
) -> None:
    """The blocks by names that both know; ComfyUI has two layers around them by the published model's."""
    targets = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    targets = (*targets, "proj_in", "time_embed.linear") if outside else targets
    path = tiny_checkpoints["ltx-video"]
    adapter = trained("ltx_video", path, tmp_path / "run", alpha=7, targets=targets)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(path)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    assert not any(name.endswith(".alpha") for name in tensors)
    theirs = {"diffusion_model.patchify_proj", "diffusion_model.adaln_single.linear"}
    assert {name.rpartition(".lora_")[0] for name in tensors} >= (theirs if outside else set())
    if outside:
        return
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    expected = deltas(adapter.model)
    assert len(expected) == 2 * (8 + 2)
    assert_same(deltas(pipeline.transformer), expected)
