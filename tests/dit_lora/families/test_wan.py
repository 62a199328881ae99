"""Wan's own facts: which kind a checkpoint is, the ranges of experts, text, conditions, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from family_cases.subject import CPU, EVERY, encoded_batch, open_subject, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import captions as captions_module
from dit_lora.families import get_family
from dit_lora.families.wan import text_to_video
from dit_lora.numerics.objectives import compute_mean_squared_error
from dit_lora.numerics.streams import RandomStreams

ROWS = 4000


def opened(path: Path, **model: Any) -> Any:
    return get_family("wan").open(ModelConfig(family="wan", path=str(path), **model))


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config; a value `None` removes the key."""
    shutil.copytree(tiny, out)
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    file = out / component / name if component else out / "model_index.json"
    merged = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in merged.items() if value != "removed"}))
    return out


def recipe_of(path: Path, **sections: Any) -> Recipe:
    model = {"family": "wan", "path": str(path), **sections.pop("model", {})}
    data = {"path": ".", "frames": 9, "height": 64, "width": 96, "fps": 8}
    return Recipe.model_validate(
        {
            "model": model,
            "data": {**data, **sections.pop("data", {})},
            "train": {"steps": 1, **sections.pop("train", {})},
            "run": {"dir": "unwritten"},
            **sections,
        }
    )


def for_recipe(path: Path, **sections: Any) -> Any:
    recipe = recipe_of(path, **sections)
    return get_family("wan").open(recipe.model, recipe)


@pytest.mark.parametrize(
    ("variant", "model", "kind"),
    [
        ("wan-2.1-t2v", {}, "Conditioning"),
        ("wan-2.1-t2v", {"task": "t2v"}, "Conditioning"),
        ("wan-2.1-i2v", {"task": "i2v"}, "MaskAndImageConditioning"),
        ("wan-2.1-flf2v", {}, "MaskAndImageConditioning"),
        ("wan-2.2-i2v-a14b", {"part": "transformer_2"}, "MaskAndImageConditioning"),
        ("wan-2.2-ti2v-5b", {}, "Conditioning"),
        ("wan-2.2-ti2v-5b", {"task": "t2v"}, "Conditioning"),
        ("wan-2.2-ti2v-5b", {"task": "i2v"}, "FirstFrameConditioning"),
    ],
)
def test_the_files_say_the_kind_and_not_the_name(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, variant: str, model: dict, kind: str
) -> None:
    unnamed = tmp_path / "checkpoint"
    unnamed.symlink_to(tiny_checkpoints[variant])
    checkpoint = opened(unnamed, **model)
    assert type(checkpoint.denoiser.conditioning).__name__ == kind
    chosen = kind == "FirstFrameConditioning"
    expected = {"_class_name": "WanImageToVideoPipeline"} if chosen else {}
    assert checkpoint.info.model_index_changes() == expected


@pytest.mark.parametrize(("variant", "boundary"), [("wan-2.2-t2v-a14b", 0.875), ("wan-2.2-i2v-a14b", 0.9)])
@pytest.mark.parametrize("part", ["transformer", "transformer_2"])
def test_each_expert_draws_in_its_own_range_alone(
    tiny_checkpoints: dict[str, Path], variant: str, boundary: float, part: str
) -> None:
    """And with the shape that the whole density has there, cut after the shift."""
    checkpoint = opened(tiny_checkpoints[variant], part=part)
    batch = {"latent_mean": torch.zeros(ROWS, 16, 1, 1, 1)}
    sigmas = RandomStreams(0, range(ROWS)).draw_random_tensors(
        checkpoint.denoiser.get_random_input_samplers(batch), CPU
    )["timestep"]
    high = part == "transformer"
    # As the pipeline decides between them.
    assert ((1000 * sigmas >= boundary * 1000) == high).all()
    assert checkpoint.denoiser.timestep_range == (
        range(int(1000 * boundary), 1000) if high else range(int(1000 * boundary))
    )
    # Logit-normal at shift 3 has s = 3u / (1 + 2u). Over 50,000 samples, a side has its median within 0.004.
    u = torch.sigmoid(torch.randn(50_000, generator=torch.Generator().manual_seed(1)))
    s = 3 * u / (1 + 2 * u)
    side = s[s >= boundary] if high else s[s < boundary]
    assert sigmas.median().item() == pytest.approx(side.median().item(), abs=0.01)


def test_both_experts_are_two_models(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["wan-2.2-t2v-a14b"]
    first_expert, two = (
        opened(path, part=part).denoiser.load_transformer(torch.float32) for part in ("transformer", "transformer_2")
    )
    assert not torch.equal(first_expert.proj_out.weight, two.proj_out.weight)


def test_a_recipe_may_cut_an_experts_range_and_not_leave_it(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["wan-2.2-t2v-a14b"]
    low = {"model": {"part": "transformer_2"}}
    cut = for_recipe(path, **low, train={"timesteps": {"t_min": 0.2}})
    assert (cut.denoiser.objective.distribution.t_min, cut.denoiser.objective.distribution.t_max) == (0.2, 0.875)
    with pytest.raises(DitLoraError, match=r"from 0 on and below 0\.875"):
        for_recipe(path, **low, train={"timesteps": {"t_max": 0.95}})
    with pytest.raises(DitLoraError, match=r"model\.part is missing: .* has two experts"):
        for_recipe(path)
    with pytest.raises(DitLoraError, match="has one transformer"):
        opened(tiny_checkpoints["wan-2.1-t2v"], part="transformer_2")


def test_published_shifts_are_the_default(tiny_checkpoints: dict[str, Path]) -> None:
    shifts = {"wan-2.1-t2v": 3.0, "wan-2.1-flf2v": 16.0, "wan-2.2-ti2v-5b": 5.0}
    for variant, shift in shifts.items():
        objective = opened(tiny_checkpoints[variant]).denoiser.objective
        assert (objective.shift, objective.num_train_timesteps) == (shift, 1000)


@pytest.mark.parametrize(
    ("variant", "component", "values", "words"),
    [
        ("wan-2.1-t2v", "", {"_class_name": "WanVACEPipeline"}, "is a WanVACEPipeline checkpoint"),
        ("wan-2.1-t2v", "", {"boundary_ratio": 0.9}, "no transformer_2 and boundary_ratio: 0.9"),
        ("wan-2.2-t2v-a14b", "", {"boundary_ratio": None}, "a transformer_2 and boundary_ratio: N"),
        ("wan-2.2-t2v-a14b", "", {"boundary_ratio": 875}, "above 0 and below 1; got 875"),
        ("wan-2.1-i2v", "transformer", {"in_channels": 32}, "in_channels must be 36; got 32"),
        ("wan-2.2-ti2v-5b", "vae", {"z_dim": 48}, "in_channels must be 48; got 8"),
        ("wan-2.1-i2v", "", {"image_encoder": [None, None]}, "image_dim.*has no image_encoder"),
        ("wan-2.1-t2v", "transformer", {"image_dim": 16}, "its pipeline has no image"),
        ("wan-2.1-t2v", "scheduler", {"use_flow_sigmas": False}, "predicts the flow with one"),
        ("wan-2.1-t2v", "scheduler", {"_class_name": "DDIMScheduler"}, "predicts the flow with"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    variant: str,
    component: str,
    values: dict[str, Any],
    words: str,
) -> None:
    path = changed(tiny_checkpoints[variant], tmp_path / "m", component, **values)
    with pytest.raises(DitLoraError, match=words):
        opened(path)


def test_torn_weights_of_an_expert_or_an_encoder_are_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Before anything is encoded; of the expert that does not train too, which samples need."""
    for variant, component in (
        ("wan-2.2-t2v-a14b", "transformer_2"),
        ("wan-2.1-i2v", "image_encoder"),
    ):
        path = Path(shutil.copytree(tiny_checkpoints[variant], tmp_path / variant))
        (file,) = (path / component).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(DitLoraError, match=f"is incomplete.*\n.*{component}/"):
            opened(path)


def test_older_configs_are_filled_up(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    removed = dict.fromkeys(("scale_factor_spatial", "scale_factor_temporal"), "removed")
    path = changed(tiny_checkpoints["wan-2.1-t2v"], tmp_path / "m", "vae", **removed)
    checkpoint = opened(path)
    assert checkpoint.info.size_multiple == 16
    assert checkpoint.info.find_shape_errors(VideoShape(9, 64, 96)) == []


@pytest.mark.parametrize(
    ("variant", "task", "words"),
    [
        ("wan-2.1-t2v", "i2v", "i2v: .* makes videos only from text"),
        ("wan-2.1-i2v", "t2v", "t2v: .* starts from an image"),
        ("wan-2.2-t2v-a14b", "i2v", "TI2V-5B .* can do both"),
    ],
)
def test_a_task_that_it_cannot_do_is_refused(
    tiny_checkpoints: dict[str, Path], variant: str, task: str, words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        opened(tiny_checkpoints[variant], task=task)


@pytest.mark.parametrize(
    ("variant", "sections", "words"),
    [
        ("wan-2.1-t2v", {"data": {"image_dropout": 0.1}}, "data.image_dropout: family wan"),
        ("wan-2.1-i2v", {"data": {"image_dropout": 0.1}}, "data.image_dropout: family wan"),
        ("wan-2.1-i2v", {"data": {"image_noise": False}}, "data.image_noise: family wan"),
        ("wan-2.1-t2v", {"data": {"image_column": "first"}}, "data.image_column: family wan"),
        ("wan-2.1-flf2v", {"data": {"image_column": "a"}}, "data.image_column does not apply"),
        (
            "wan-2.1-i2v",
            {"validation": {"prompts": ["a"]}},
            "one first image for each prompt; got 0 for 1",
        ),
        (
            "wan-2.1-flf2v",
            {"validation": {"prompts": ["a"], "images": ["b"]}},
            "last_images: give one last image for each prompt; got 0 for 1",
        ),
        (
            "wan-2.1-i2v",
            {"validation": {"prompts": ["a"], "images": ["b"], "last_images": ["c"]}},
            "last_images: it takes no last image; remove it",
        ),
        ("wan-2.1-i2v", {"data": {"frames": 1, "fps": None}}, "frames must be 5 or more"),
        ("wan-2.1-t2v", {"data": {"frames": 10}}, r"frames must be 4n \+ 1; got 10, nearest 9 and"),
        ("wan-2.1-t2v", {"train": {"guidance_scale": 1.0}}, "train.guidance_scale: family wan"),
    ],
)
def test_a_recipe_that_wan_cannot_train_is_refused(
    tiny_checkpoints: dict[str, Path], variant: str, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        for_recipe(tiny_checkpoints[variant], **sections)


def test_task_is_refused_by_families_that_have_none(tiny_checkpoints: dict[str, Path]) -> None:
    model = {"family": "cogvideox", "path": str(tiny_checkpoints["cogvideox-2b"]), "task": "t2v"}
    recipe = recipe_of(Path(model["path"]), model=model)
    with pytest.raises(DitLoraError, match=r"model\.task: family cogvideox does not use this"):
        get_family("cogvideox").open(recipe.model, recipe)


def test_text_is_512_tokens_with_zeros_behind_its_end(tiny_checkpoints: dict[str, Path]) -> None:
    """And cleaned as the pipeline does: white space, HTML. One caption's rows do not depend on the others."""
    checkpoint = opened(tiny_checkpoints["wan-2.1-i2v"])
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    short, long = "a  cat &amp;amp; a dog ", "x" * 600
    embeds = encode([short, long])["prompt_embeds"]
    assert embeds.shape == (2, 512, 32)
    tokens = len("a cat & a dog".replace(" ", "")) + 1  # a letter each, one that ends it
    assert embeds[0, :tokens].abs().amin(0).max() > 0
    assert (embeds[0, :tokens] != 0).any(-1).all()
    assert (embeds[0, tokens:] == 0).all()
    assert (embeds[1] != 0).any(-1).all()
    torch.testing.assert_close(encode(["a cat & a dog"])["prompt_embeds"][0], embeds[0])


def test_a_run_says_that_ftfy_is_missing(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a caption may be changed by it; and what is cached without it is not taken where it is there."""
    path, messages, facts = tiny_checkpoints["wan-2.1-t2v"], [], []
    captions = ("a cat & a dog", "a cat\u2019s dog", "a cat &amp; a dog")
    for is_installed in (False, True):
        for module in (text_to_video, captions_module):
            monkeypatch.setattr(module, "is_ftfy_available", lambda is_available=is_installed: is_available)
        checkpoint = for_recipe(path)
        messages.append([checkpoint.encoders.list_caption_warnings([caption]) for caption in captions])
        facts.append(checkpoint.encoders.text_cache_key())
    assert [len(lines) for lines in messages[0]] == [0, 1, 1]
    assert "pip install ftfy" in messages[0][1][0]
    assert messages[1] == [[], [], []]
    assert facts[0] != facts[1]


def test_loading_keeps_what_wan_keeps_in_fp32(tiny_checkpoints: dict[str, Path]) -> None:
    model = opened(tiny_checkpoints["wan-2.1-i2v"]).denoiser.load_transformer(torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.float32}
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.1.norm2.weight"} <= wide
    assert "condition_embedder.time_embedder.linear_1.weight" in wide
    assert model.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16
    assert model.rope.freqs_cos.dtype is torch.get_default_dtype()


@pytest.mark.parametrize("variant", ["wan-2.1-i2v", "wan-2.1-flf2v"])
def test_the_condition_is_encoded_from_zero_pixels_behind_the_pictures(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """Normalised posterior means of the whole video; the mask is 1 in all four channels where a picture stands."""
    path, has_last = tiny_checkpoints[variant], variant == "wan-2.1-flf2v"
    pixels = pixels_of(VideoShape(13, 64, 96), torch.Generator().manual_seed(2))
    encoded = opened(path).encoders.load_video_encoder(torch.bfloat16, CPU)(pixels)
    mask, condition = encoded["image_latents"].split((4, 16))
    assert encoded["image_latents"].dtype is encoded["image_embeds"].dtype is torch.float32
    assert encoded["image_embeds"].shape == (1 + has_last, 5, 16)
    assert (mask[:, 0] == 1).all()
    # Frames are grouped by four behind the first: the last one is the fourth of its group.
    assert (mask[:, 1:3] == 0).all()
    assert (mask[:, 3] == torch.tensor([0, 0, 0, has_last])[:, None, None]).all()

    vae = AutoencoderKLWan.from_pretrained(path, subfolder="vae").double()
    video = (2 * (pixels.double() / 255) - 1).transpose(0, 1)[None]
    video[:, :, 1 : 12 if has_last else 13] = 0
    mean, std = (
        torch.tensor(v, dtype=torch.float64)[:, None, None, None]
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        expected = (vae.encode(video).latent_dist.mean[0] - mean) / std
    torch.testing.assert_close(condition.double(), expected, rtol=1e-4, atol=1e-5)
    # Zeros in pixels are not zeros in latents.
    assert condition[:, 1:].abs().mean() > 0.05


def test_an_image_of_the_clips_own_is_what_stands_in_front(
    tiny_checkpoints: dict[str, Path],
) -> None:
    for variant, task in (("wan-2.1-i2v", None), ("wan-2.2-ti2v-5b", "i2v")):
        encode = opened(tiny_checkpoints[variant], task=task).encoders.load_video_encoder(torch.float32, CPU)
        clip_pixels, image_pixels = (
            pixels_of(VideoShape(9, 64, 96), torch.Generator().manual_seed(n)) for n in (1, 2)
        )
        own_encoding, expected = encode(clip_pixels, image_pixels[0]), encode(image_pixels)
        for name, tensor in encode(clip_pixels).items():
            of_image = name.startswith("image_")
            assert torch.equal(own_encoding[name], expected[name]) == of_image
            assert torch.equal(own_encoding[name], tensor) != of_image


def test_samples_without_their_image_are_trained_as_text_to_video(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """A share of the draws, `data.image_dropout`, has the loss of the task t2v, over all frames."""
    path = tiny_checkpoints["wan-2.2-ti2v-5b"]
    case = EVERY["wan-2.2-ti2v-5b-i2v"]
    batch = encoded_batch(open_subject(case, path))
    transformer = opened(path).denoiser.load_transformer(torch.float32)

    def losses(checkpoint: Any) -> torch.Tensor:
        with torch.no_grad():
            return checkpoint.denoiser.losses(transformer, batch, RandomStreams(5, [0, 1, 2])).losses

    i2v = {"model": {"task": "i2v"}}
    never, always = (losses(for_recipe(path, **i2v, data={"image_dropout": share})) for share in (0.0, 1.0))
    text = losses(opened(path))
    torch.testing.assert_close(always, text, rtol=1e-5, atol=0)
    assert (never - text).abs().min() > 1e-3
    # At a half each sample is one or the other.
    half = for_recipe(path, **i2v, data={"image_dropout": 0.5})
    keep_mask = RandomStreams(5, [0, 1, 2]).draw_random_tensors(half.get_random_input_samplers(batch), CPU)[
        "image_dropout"
    ]
    expected = torch.where(keep_mask, never, text)
    torch.testing.assert_close(losses(half), expected, rtol=1e-5, atol=0)
    many = {name: tensor[:1].expand(ROWS, *tensor.shape[1:]) for name, tensor in batch.items()}
    random_inputs = RandomStreams(5, range(ROWS)).draw_random_tensors(
        {"image_dropout": half.get_random_input_samplers(many)["image_dropout"]}, CPU
    )
    assert random_inputs["image_dropout"].float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_no_loss_is_taken_where_the_image_stands(tiny_checkpoints: dict[str, Path]) -> None:
    """Neither does the clip's own first frame matter there, nor the noise."""
    path = tiny_checkpoints["wan-2.2-ti2v-5b"]
    checkpoint = opened(path, task="i2v")
    batch = encoded_batch(open_subject(EVERY["wan-2.2-ti2v-5b-i2v"], path))
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    streams = RandomStreams(5, [0, 1, 2])
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    with torch.no_grad():
        before = checkpoint.denoiser.losses(transformer, batch, streams).losses
        clean = checkpoint.denoiser.clean_latents(batch, random_inputs)
        noisy = checkpoint.denoiser.objective.add_noise(clean, random_inputs["noise"], random_inputs["timestep"])
        velocity = checkpoint.denoiser.predict(transformer, noisy, 1000 * random_inputs["timestep"], batch)
        behind = (tensor[:, :, 1:] for tensor in (velocity, random_inputs["noise"] - clean))
        torch.testing.assert_close(compute_mean_squared_error(*behind), before, rtol=1e-6, atol=0)
        batch["latent_mean"][:, :, 0] += 1
        assert torch.equal(checkpoint.denoiser.losses(transformer, batch, streams).losses, before)
        batch["image_latents"] += 1
        assert (checkpoint.denoiser.losses(transformer, batch, streams).losses != before).all()
