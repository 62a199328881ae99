"""Z-Image's own facts: time and sign, captions of several lengths, guidance, signs of Turbo, what is refused."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from family_cases.subject import CPU
from peft.tuners.lora import LoraLayer
from torch import nn
from z_image_cases import CAPTIONS, changed, opened, some_batch

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import LoraConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.z_image.checkpoint import find_turbo_reason
from dit_lora.numerics.streams import RandomStreams, make_generator
from dit_lora.planning.search import open_estimator

SEED, POSITIONS = 11, [3, 400, 21]


class Recorder(nn.Module):
    """Answers with fixed predictions, a list of them, and keeps what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.asked: Any = None

    def forward(self, x: Any, t: Any, cap_feats: Any, *, return_dict: bool) -> tuple[Any]:
        assert not return_dict
        self.asked = x, t, cap_feats
        return (list(self.answer.unsqueeze(2)),)


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


@pytest.mark.parametrize(("variant", "sampling_shift"), [("z-image", 6.0), ("z-image-turbo", 3.0)])
def test_time_runs_backwards_and_the_output_is_the_negative_velocity(
    tiny_checkpoints: dict[str, Path], variant: str, sampling_shift: float
) -> None:
    """Posterior draw, scale, noise level, time, velocity, mean: an fp64 computation, each draw from its own stream."""
    checkpoint, batch = opened(tiny_checkpoints[variant]), some_batch()
    model = Recorder(torch.randn(3, 4, 4, 6, generator=torch.Generator().manual_seed(2)))
    output = checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))
    latents, timesteps, captions = model.asked

    spread = (batch["latent_logvar"].double() / 2).exp()
    latent = batch["latent_mean"].double() + spread * own_draws((4, 4, 6), "posterior")
    clean = (latent - 0.1159) * 0.3611
    level = 1 / (1 + (-own_draws((), "timestep")).exp())
    sigma = 2 / (2 + 1 / level - 1)
    assert checkpoint.info.scheduler_shift == sampling_shift
    noise = own_draws((4, 4, 6), "noise")
    noisy = clean + sigma.view(3, 1, 1, 1) * (noise - clean)
    for item, expected in zip(latents, noisy, strict=True):
        torch.testing.assert_close(item.double(), expected[:, None], rtol=2e-6, atol=2e-6)
    assert timesteps.dtype is torch.float32
    torch.testing.assert_close(timesteps.double(), 1 - sigma, rtol=2e-6, atol=2e-7)
    assert [len(caption) for caption in captions] == [3, 512, 77]
    for item, embeddings in zip(captions, batch["prompt_embeds"], strict=True):
        assert torch.equal(item, embeddings[: len(item)])
    losses = (-model.answer.double() - (noise - clean)).square().mean((1, 2, 3))
    torch.testing.assert_close(output.losses.double(), losses, rtol=2e-6, atol=0)
    assert output.timesteps.tolist() == [math.floor(t) for t in (1000 * sigma).tolist()]


def test_in_bf16_latents_are_rounded_and_the_time_is_not(path: Path) -> None:
    batch = {**some_batch(), "prompt_embeds": some_batch()["prompt_embeds"].bfloat16()}
    model, t = Recorder(torch.zeros(3, 4, 4, 6).bfloat16()), torch.tensor([371.3, 804.9, 5.99])
    noisy = torch.randn(3, 4, 4, 6)
    prediction = opened(path).denoiser.predict(model, noisy, t, batch)
    latents, timesteps, _ = model.asked
    assert torch.equal(torch.stack(latents)[:, :, 0], noisy.bfloat16())
    assert torch.equal(timesteps, (1000 - t) / 1000)
    assert (prediction.shape, prediction.dtype) == (noisy.shape, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_unequal_captions_is_one_call_of_the_pipeline(path: Path, dtype: torch.dtype) -> None:
    """Bit for bit: captions of 37, 19 and 72 tokens, which are padded to 64, 32 and 96."""
    checkpoint = opened(path)
    text = checkpoint.encoders.load_text_encoder(dtype, CPU)(CAPTIONS)
    assert text["prompt_attention_mask"].sum(1).tolist() == [37, 19, 72]
    pipeline = checkpoint.sampler.pipeline(dtype, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[Any, Any]] = []
    pipeline.transformer.register_forward_hook(
        lambda _m, args, _kwargs, output: calls.append((args, output[0])), with_kwargs=True
    )
    pipeline(
        **checkpoint.sampler.prompt_kwargs(text),
        **checkpoint.sampler.shape_kwargs(VideoShape(1, 48, 80)),
        num_inference_steps=3,
        guidance_scale=0.0,
        generator=torch.Generator().manual_seed(1),
    )
    transformer = checkpoint.denoiser.load_transformer(dtype).eval()
    assert len(calls) == 3
    for ((latents, *_), expected), t in zip(calls, pipeline.scheduler.timesteps, strict=True):
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, torch.stack(latents)[:, :, 0], t.repeat(3), text)
        assert prediction.dtype is dtype
        assert torch.equal(prediction, -torch.stack(expected)[:, :, 0])
    assert len({tuple(row.flatten().tolist()) for row in prediction}) == 3


def test_neighbours_and_what_lies_behind_a_caption_do_not_matter(path: Path) -> None:
    """A longer neighbour adds padding, which is masked: equal up to rounding. Padding in the cache is never read."""
    checkpoint, batch = opened(path), some_batch()
    transformer = checkpoint.denoiser.load_transformer(torch.float32).eval()
    noisy, t = torch.randn(3, 4, 4, 6), torch.tensor([371.3, 804.9, 5.99])
    with torch.no_grad():
        full_prediction = checkpoint.denoiser.predict(transformer, noisy, t, batch)
        for row in range(3):
            single_batch = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            prediction = checkpoint.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], single_batch)
            torch.testing.assert_close(prediction[0], full_prediction[row], rtol=1e-5, atol=1e-5)
        is_padding = ~batch["prompt_attention_mask"]
        changed_batch = {
            **batch,
            "prompt_embeds": batch["prompt_embeds"].masked_fill(is_padding[..., None], 7),
        }
        assert torch.equal(checkpoint.denoiser.predict(transformer, noisy, t, changed_batch), full_prediction)
        shorter = {**batch, **some_batch((3, 512, 76))}
        apart = (checkpoint.denoiser.predict(transformer, noisy, t, shorter) - full_prediction).abs().amax((1, 2, 3))
    assert apart[2] > 1e-3 > 1e-5 > apart[:2].max()


def test_a_trained_pad_is_attended_to(path: Path) -> None:
    """Image and caption are padded to multiples of 32 tokens; a tiny checkpoint's padding must not be zero."""
    checkpoint, batch = opened(path), some_batch()
    transformer = checkpoint.denoiser.load_transformer(torch.float32).eval()
    noisy, t = torch.randn(3, 4, 4, 6), torch.tensor([371.3, 804.9, 5.99])
    with torch.no_grad():
        full_prediction = checkpoint.denoiser.predict(transformer, noisy, t, batch)
        for name in ("x_pad_token", "cap_pad_token"):
            pad = getattr(transformer, name)
            assert pad.abs().min() > 0
            pad.neg_()
            apart = (checkpoint.denoiser.predict(transformer, noisy, t, batch) - full_prediction).abs()
            assert (apart.amax((1, 2, 3)) > 1e-3).tolist() == [True, name == "x_pad_token", True]
            pad.neg_()


def test_guidance_adds_w_times_the_difference_and_cached_text_gives_the_same(path: Path) -> None:
    """The paper's scale is w + 1; at 0 nothing is predicted for "", and at 1 it is."""
    checkpoint = opened(path)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    full_pipeline = checkpoint.sampler.pipeline(torch.float32)
    cached = checkpoint.sampler.pipeline(torch.float32, full_pipeline.transformer, text=False)
    calls: list[list[torch.Tensor]] = []
    full_pipeline.transformer.register_forward_hook(lambda _m, _args, output: calls.append(output[0]))
    steps: list[torch.Tensor] = []
    step = full_pipeline.scheduler.step
    full_pipeline.scheduler.step = lambda velocity, *args, **named: (
        steps.append(velocity) or step(velocity, *args, **named)
    )
    for pipeline in (full_pipeline, cached):
        pipeline.set_progress_bar_config(disable=True)

    def made(scale: float) -> None:
        calls.clear()
        steps.clear()
        sampling = Sampling(VideoShape(1, 32, 64), inference_steps=2, guidance_scale=scale, seed=3)
        video_of_text = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
        assert video_of_text.float().std() > 1
        text, empty = encode(["a cat"]), encode([""])
        assert torch.equal(
            checkpoint.sampler.generate(cached, checkpoint.sampler.prompt_kwargs(text, empty), sampling),
            video_of_text,
        )

    made(0.0)
    assert [len(output) for output in calls] == [1] * 4
    made(1.0)
    assert [len(output) for output in calls] == [checkpoint.sampler.guidance_batch_size] * 4
    made(4.5)
    conditional, unconditional = calls[0]
    expected = conditional + 4.5 * (conditional - unconditional)
    torch.testing.assert_close(steps[0][0], -expected[:, 0], rtol=1e-6, atol=1e-6)


def test_a_plan_counts_guidance_from_above_0_on(path: Path, recipe_values: dict[str, Any]) -> None:
    recipes = [recipe_for(path, recipe_values, validation={"guidance_scale": w}) for w in (0.0, 0.5)]
    subject = open_estimator(recipes[0], is_gpu=False)
    unguided, guided = (subject.measure_inference_peak(recipe) for recipe in recipes)
    assert guided > 1.5 * unguided


def test_targets_are_attention_in_every_layer_and_refiner(path: Path) -> None:
    checkpoint = opened(path)
    model = checkpoint.denoiser.load_transformer(torch.float32)
    targets = checkpoint.info.lora_targets(get_family("z_image").lora_targets)
    attach_lora(model, LoraConfig(rank=2), targets, seed=0)
    adapted_layers = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    blocks = ("noise_refiner.0", "context_refiner.0", "layers.0", "layers.1")
    layers = ("to_q", "to_k", "to_v", "to_out.0")
    assert adapted_layers == {f"{block}.attention.{layer}" for block in blocks for layer in layers}


def test_comfyui_has_a_name_for_every_linear_layer(path: Path) -> None:
    """The names of its `z_image_to_diffusers` (comfy/utils.py at b3be02d). It would skip a layer without a name."""
    pattern = re.compile(
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.to_([qkv]|out\.0)|feed_forward\.w[123]"
        r"|adaLN_modulation\.0)|all_final_layer\.2-1\.(linear|adaLN_modulation\.1)|all_x_embedder\.2-1"
        r"|cap_embedder\.1|t_embedder\.mlp\.[02]"
    )
    model = opened(path).denoiser.load_transformer(torch.float32)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 4 * 7 + 3 + 6
    comfyui = get_family("z_image").comfyui
    assert [name for name in linear if not pattern.fullmatch(name)] == []
    assert [comfyui.translate_layer_name(name) for name in linear] == [f"transformer.{name}" for name in linear]


@pytest.mark.parametrize(
    ("name", "shift", "sign"),
    [
        ("Tongyi-MAI/Z-Image-Turbo", 3.0, "its name"),
        ("/models/z_image_turbo_bf16/", 6.0, "its name"),
        ("Tongyi-MAI/Z-Image", 6.0, None),
        ("/turbo/z-image", 6.0, None),
        ("runs/merged", 3.0, "its scheduler's shift of 3, where the base has 6"),
        ("ostris/Z-Image-De-Turbo", 3.0, None),
        ("models/z-image-deturbo", 3.0, None),
        ("models/z-image-dedistilled", 3.0, None),
    ],
)
def test_turbo_is_guessed_by_its_name_or_its_shift(name: str, shift: float, sign: str | None) -> None:
    assert find_turbo_reason(name, shift) == sign


def test_a_turbo_that_trains_alone_is_warned_of_and_over_an_adapter_is_not(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, recipe_values: dict[str, Any]
) -> None:
    def said(path: Path, **sections: Any) -> str:
        recipe = recipe_for(path, recipe_values, **sections)
        return " ".join(get_family("z_image").open(recipe.model, recipe).info.recipe_notes(recipe))

    turbo = tiny_checkpoints["z-image-turbo"]
    message = said(turbo)
    assert "may be Z-Image-Turbo, by its name (no file of it says so)" in message
    assert "lora.under=[ostris/zimage_turbo_training_adapter/" in message
    assert "validation.model" in message
    unnamed = Path(shutil.copytree(turbo, tmp_path / "merged"))
    assert "by its scheduler's shift of 3" in said(unnamed)
    assert "distilled" not in said(turbo, lora={"rank": 4, "under": [{"path": "a.safetensors"}]})
    assert "distilled" not in said(turbo, train={**recipe_values["train"], "target": "guided"})
    assert "distilled" not in said(tiny_checkpoints["z-image"])
    model_values = {"family": "z_image", "path": str(turbo), "from_scratch": {"n_layers": 1}}
    full_training = {
        "train": {**recipe_values["train"], "mode": "full"},
        "optim": {"groups": {"backbone": {"lr": 1e-3}}},
    }
    del recipe_values["lora"]
    assert "distilled" in said(turbo, **full_training)
    assert "distilled" not in said(turbo, model=model_values, **full_training)


def recipe_for(path: Path, values: dict[str, Any], **sections: Any) -> Recipe:
    data = {"path": ".", "height": 64, "width": 96}
    changes = {"data": data, "model": {"family": "z_image", "path": str(path)}, **sections}
    return parse_recipe({**values, **changes}, "test")


@pytest.mark.parametrize(
    ("component", "values", "words"),
    [
        ("scheduler", {"_class_name": "DDIMScheduler"}, "scheduler DDIMScheduler is not the one"),
        ("scheduler", {"use_dynamic_shifting": True}, "shifts by image size"),
        ("", {"_class_name": "ZImageOmniPipeline"}, "a ZImageOmniPipeline checkpoint"),
        ("transformer", {"all_patch_size": [4]}, r"asks for patches of 2x2x1.*all_patch_size=\[4]"),
        (
            "transformer",
            {"axes_lens": [513, 32, 32]},
            "need 514 positions; its transformer has 513",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    path: Path, tmp_path: Path, component: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        opened(changed(path, tmp_path / "m", component, **values))


def test_the_longest_caption_and_the_largest_picture_are_just_within_the_positions(path: Path, tmp_path: Path) -> None:
    """The picture is behind 512 tokens of text, which begin at 1."""
    checkpoint = opened(changed(path, tmp_path / "m", "transformer", axes_lens=[514, 2, 3]))
    checkpoint.info.check_shape(VideoShape(1, 32, 48))
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    batch = {name: tensor[1:2] for name, tensor in some_batch().items()}
    noisy, t = torch.randn(1, 4, 4, 6), torch.tensor([371.3])
    assert checkpoint.denoiser.predict(transformer, noisy, t, batch).isfinite().all()
    short = changed(path, tmp_path / "short", "transformer", axes_lens=[514, 2, 2])
    with pytest.raises(DitLoraError, match=r"data\.width can be 32 at most"):
        opened(short).info.check_shape(VideoShape(1, 32, 48))


def test_pictures_are_encoded_in_fp32_whatever_the_policy(path: Path) -> None:
    pixels = torch.randint(0, 256, (1, 3, 32, 64)).to(torch.uint8)
    full, half = (
        opened(path).encoders.load_video_encoder(dtype, CPU)(pixels) for dtype in (torch.float32, torch.bfloat16)
    )
    vae = ZImagePipeline.from_pretrained(path).vae
    with torch.no_grad():
        posterior = vae.encode(pixels / 127.5 - 1).latent_dist
    expected = {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}
    for name, tensor in expected.items():
        assert full[name].dtype is half[name].dtype is torch.float32
        assert torch.equal(full[name], tensor)
        assert torch.equal(half[name], tensor)
