"""CogVideoX image-to-video and 1.5, recomputed apart from their code, in fp64 where there is arithmetic."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler
from PIL import Image
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.numerics.streams import RandomStreams, make_generator

CPU = torch.device("cpu")
SEED, POSITIONS = 11, [3, 400, 21]
NOISED = 4
IMAGE_VARIANTS = ("cogvideox-5b-i2v", "cogvideox-1.5-i2v")


class Recorder(nn.Module):
    """Answers with a fixed prediction and keeps what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = kwargs
        return (self.answer,)


def open_checkpoint(path: Path, **model: Any) -> Any:
    return get_family("cogvideox").open(ModelConfig(family="cogvideox", path=str(path), **model))


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


def random_batch(encodings: int = 1 + NOISED) -> dict[str, torch.Tensor]:
    """Three samples of 9x64x96, as the cache keeps them, every value drawn."""
    g = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 4, 3, 8, 12, generator=g) for _ in range(2))
    image_mean, image_logvar = (torch.randn(3, encodings, 4, 1, 8, 12, generator=g) for _ in range(2))
    return {
        "latent_mean": mean,
        "latent_logvar": logvar,
        "image_latent_mean": image_mean,
        "image_latent_logvar": image_logvar,
        "prompt_embeds": torch.randn(3, 226, 32, generator=g),
    }


def losses(checkpoint: Any, batch: dict[str, torch.Tensor], frames: int) -> tuple[Recorder, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    model = Recorder(torch.randn(3, frames, 4, 8, 12, generator=g))
    return model, checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS)).losses


def noised_latents(path: Path, batch: dict[str, torch.Tensor], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents and velocities, (3, padding + 3, 4, 8, 12), by Diffusers' scheduler in fp64."""
    scheduler = CogVideoXDPMScheduler.from_pretrained(path, subfolder="scheduler")
    std = (0.5 * batch["latent_logvar"].double()).exp()
    sample = batch["latent_mean"].double() + std * own_draws((4, 3, 8, 12), "posterior")
    clean = 0.7 * torch.cat([*[sample[:, :, :1]] * padding, sample], 2).transpose(1, 2)
    noise = own_draws((4, padding + 3, 8, 12), "noise").transpose(1, 2)
    draws = [torch.randint(0, 1000, (1,), generator=make_generator(SEED, "timestep", p)) for p in POSITIONS]
    timesteps = torch.cat(draws)
    noisy = scheduler.add_noise(clean, noise, timesteps)
    return noisy, scheduler.get_velocity(clean, noise, timesteps)


@pytest.mark.parametrize("variant", ["cogvideox-1.5", "cogvideox-1.5-i2v"])
def test_the_first_latent_frame_is_repeated_in_front_and_no_loss_is_taken_there(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """Three latent frames in patches of two: the pipeline drops the one in front."""
    path, batch = tiny_checkpoints[variant], random_batch()
    model, loss = losses(open_checkpoint(path), batch, frames=4)
    noisy, target = noised_latents(path, batch, padding=1)
    hidden = model.asked["hidden_states"][:, :, :4].double()
    torch.testing.assert_close(hidden, noisy, rtol=1e-5, atol=1e-5)
    expected = (model.answer.double() - target)[:, 1:].square().flatten(1).mean(1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_nothing_is_padded_where_a_patch_is_one_frame(tiny_checkpoints: dict[str, Path]) -> None:
    path, batch = tiny_checkpoints["cogvideox-5b-i2v"], random_batch()
    model, loss = losses(open_checkpoint(path), batch, frames=3)
    noisy, target = noised_latents(path, batch, padding=0)
    hidden = model.asked["hidden_states"][:, :, :4].double()
    torch.testing.assert_close(hidden, noisy, rtol=1e-5, atol=1e-5)
    expected = (model.answer.double() - target).square().flatten(1).mean(1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize(
    ("variant", "scale", "frames"),
    [("cogvideox-5b-i2v", 0.7, 3), ("cogvideox-1.5-i2v", 1 / 0.7, 4)],
)
def test_the_images_latent_stands_in_the_first_place_with_the_checkpoints_scale(
    tiny_checkpoints: dict[str, Path], variant: str, scale: float, frames: int, noise: bool
) -> None:
    """Drawn from the posterior of a drawn noised encoding, or of the clean one; zeros elsewhere."""
    batch = random_batch(1 + NOISED * noise)
    model, _ = losses(open_checkpoint(tiny_checkpoints[variant]), batch, frames)
    image_channels = model.asked["hidden_states"][:, :, 4:].double()
    draws = [make_generator(SEED, "image_noise", p) for p in POSITIONS]
    picked = [int(torch.randint(1, 1 + NOISED, (1,), generator=g)) if noise else 0 for g in draws]
    assert len(set(picked)) > 1 or not noise
    rows = range(3)
    mean = torch.stack([batch["image_latent_mean"][r, k] for r, k in zip(rows, picked, strict=True)])
    logvar = torch.stack([batch["image_latent_logvar"][r, k] for r, k in zip(rows, picked, strict=True)])
    posterior_noise = own_draws((4, 1, 8, 12), "image_posterior")
    latent = mean.double() + (0.5 * logvar.double()).exp() * posterior_noise
    expected = torch.zeros(3, frames, 4, 8, 12, dtype=torch.float64)
    expected[:, 0] = scale * latent[:, :, 0]
    torch.testing.assert_close(image_channels, expected, rtol=1e-5, atol=1e-6)


def test_only_1_5_is_given_an_offset_and_it_is_two(tiny_checkpoints: dict[str, Path]) -> None:
    old, _ = losses(open_checkpoint(tiny_checkpoints["cogvideox-5b-i2v"]), random_batch(), 3)
    new, _ = losses(open_checkpoint(tiny_checkpoints["cogvideox-1.5-i2v"]), random_batch(), 4)
    assert "ofs" not in old.asked
    assert new.asked["ofs"].tolist() == [2.0]


@pytest.mark.parametrize(("variant", "tokens"), [("cogvideox-5b-i2v", 226), ("cogvideox-1.5", 224)])
def test_captions_are_as_long_as_the_config_says(tiny_checkpoints: dict[str, Path], variant: str, tokens: int) -> None:
    encode = open_checkpoint(tiny_checkpoints[variant]).encoders.load_text_encoder(torch.float32, CPU)
    assert encode(["a"])["prompt_embeds"].shape == (1, tokens, 32)


def test_images_are_left_out_for_some_samples_each_by_itself(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """Two of ten, and a sample's draw is the same in any batch."""
    count, share = 2000, 0.2
    stored = open_checkpoint(tiny_checkpoints["cogvideox-5b-i2v"]).denoiser
    denoiser = replace(stored, conditioning=replace(stored.conditioning, image_dropout=share))

    def kept(draws: range) -> torch.Tensor:
        size = len(draws)
        batch = {
            "latent_mean": torch.zeros(size, 4, 1, 2, 2),
            "latent_logvar": torch.zeros(size, 4, 1, 2, 2),
            "image_latent_mean": torch.ones(size, 1, 4, 1, 2, 2),
            "image_latent_logvar": torch.full((size, 1, 4, 1, 2, 2), -30.0),
            "prompt_embeds": torch.zeros(size, 1, 1),
        }
        model = Recorder(torch.zeros(1, 1, 1, 1, 1))
        denoiser.losses(model, batch, RandomStreams(SEED, draws))
        images = model.asked["hidden_states"][:, 0, 4:].flatten(1)
        assert ((images == 0).all(1) | (images > 0.69).all(1)).all()
        return images[:, 0] != 0

    kept_mask = kept(range(count))
    assert abs(kept_mask.float().mean() - (1 - share)) < 4 * (share * (1 - share) / count) ** 0.5
    assert torch.equal(kept(range(700, 720)), kept_mask[700:720])


def frames_and_image() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (9, 3, 64, 96), generator=g).to(torch.uint8)
    return pixels, torch.randint(0, 256, (3, 64, 96), generator=g).to(torch.uint8)


@pytest.mark.parametrize("own", [True, False])
def test_the_cache_holds_a_clean_encoding_and_four_noised_ones(tiny_checkpoints: dict[str, Path], own: bool) -> None:
    """Of the clip's own image or its first frame; the noise is on pixels, and the same at every encoding."""
    path = tiny_checkpoints["cogvideox-1.5-i2v"]
    pixels, image = frames_and_image()
    first_frame = image if own else pixels[0]
    encode = open_checkpoint(path).encoders.load_video_encoder(torch.float32, CPU)
    encoded = encode(pixels, image if own else None)
    assert encoded["latent_mean"].shape == (4, 3, 8, 12)
    assert encoded["image_latent_mean"].shape == encoded["image_latent_logvar"].shape
    assert encoded["image_latent_mean"].shape == (1 + NOISED, 4, 1, 8, 12)
    vae = AutoencoderKLCogVideoX.from_pretrained(path, subfolder="vae")

    def posterior(picture: torch.Tensor) -> Any:
        with torch.no_grad():
            return vae.encode(picture[None, :, None]).latent_dist

    clean = posterior(first_frame.float() / 127.5 - 1)
    torch.testing.assert_close(encoded["image_latent_mean"][0], clean.mean[0])
    torch.testing.assert_close(encoded["image_latent_logvar"][0], clean.logvar[0])
    assert len({float(row.sum()) for row in encoded["image_latent_mean"]}) == 1 + NOISED
    torch.manual_seed(99)
    second_encoding = encode(pixels, image if own else None)
    assert all(torch.equal(second_encoding[name], encoded[name]) for name in encoded)
    flipped = encode(pixels, image.flip(-1))["image_latent_mean"]
    assert not torch.allclose(flipped, encoded["image_latent_mean"])


def test_without_image_noise_the_clean_encoding_is_alone_under_a_key_of_its_own(
    tiny_checkpoints: dict[str, Path],
) -> None:
    noised = open_checkpoint(tiny_checkpoints["cogvideox-5b-i2v"]).encoders
    clean = replace(noised, info=replace(noised.info, has_image_noise=False))
    encoded = clean.load_video_encoder(torch.float32, CPU)(frames_and_image()[0])
    assert encoded["image_latent_mean"].shape == (1, 4, 1, 8, 12)
    assert clean.latent_cache_key() != noised.latent_cache_key()


def test_image_noise_has_a_scale_of_exp_of_a_normal_draw_at_minus_three(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Median and spread of log sigma, read off the pixels that the VAE is given."""
    encoder_inputs: list[torch.Tensor] = []
    encode = AutoencoderKLCogVideoX.encode

    def spy(self: Any, x: torch.Tensor) -> Any:
        if x.shape[2] == 1:
            encoder_inputs.append(x)
        return encode(self, x)

    monkeypatch.setattr(AutoencoderKLCogVideoX, "encode", spy)
    path = tiny_checkpoints["cogvideox-1.5-i2v"]
    encoder = open_checkpoint(path).encoders.load_video_encoder(torch.float32, CPU)
    g, logs = torch.Generator().manual_seed(3), []
    for _ in range(40):
        pixels = torch.randint(0, 256, (1, 3, 32, 48), generator=g).to(torch.uint8)
        encoder_inputs.clear()
        encoder(pixels)
        images = encoder_inputs[:-1]  # the last is the clip itself, of one frame
        noise = [(image - images[0]).double() for image in images[1:]]
        assert all(abs(tensor.mean() / tensor.std()) < 4 / tensor.numel() ** 0.5 for tensor in noise)
        logs += [tensor.std().log() for tensor in noise]
    log_sigma = torch.stack(logs)
    assert len(log_sigma) == 40 * NOISED
    assert abs(log_sigma.mean() + 3.0) < 4 * 0.5 / len(log_sigma) ** 0.5
    assert abs(log_sigma.std() - 0.5) < 4 * 0.5 / (2 * len(log_sigma)) ** 0.5


@pytest.fixture
def image_recipe(recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path]) -> dict[str, Any]:
    recipe_values["model"]["path"] = str(tiny_checkpoints["cogvideox-5b-i2v"])
    recipe_values["data"] |= {"height": 64, "width": 96}
    return recipe_values


def for_recipe(values: dict[str, Any]) -> Any:
    recipe = parse_recipe(values, source="test")
    return get_family("cogvideox").open(recipe.model, recipe)


def test_the_options_of_a_recipe_reach_the_checkpoint(image_recipe: dict[str, Any]) -> None:
    assert for_recipe(image_recipe).info.has_image_noise
    assert for_recipe(image_recipe).denoiser.conditioning.image_dropout == 0
    image_recipe["data"] |= {"image_noise": False, "image_dropout": 0.25}
    assert not for_recipe(image_recipe).info.has_image_noise
    assert for_recipe(image_recipe).denoiser.conditioning.image_dropout == 0.25


def test_prompts_without_their_first_images_are_refused(image_recipe: dict[str, Any]) -> None:
    image_recipe["validation"] |= {"prompts": ["a", "b"], "images": ["a.png"]}
    message = r"validation\.images: give one first image for each prompt; got 1 for 2 in validation\.prompts"
    with pytest.raises(DitLoraError, match=message):
        for_recipe(image_recipe)
    image_recipe["validation"] |= {"prompts": ["a", "b"], "images": ["a.png", "b.png"]}
    for_recipe(image_recipe)


def test_mirror_images_are_refused(image_recipe: dict[str, Any]) -> None:
    config = Path(image_recipe["model"]["path"]) / "transformer" / "config.json"
    assert "sample_frames" in config.read_text()
    image_recipe["model"]["path"] = image_recipe["model"]["path"].replace("5b-i2v", "1.5-i2v")
    image_recipe["data"] |= {"frames": 1, "flip": True, "fps": None}
    with pytest.raises(DitLoraError, match=r"data\.flip"):
        for_recipe(image_recipe)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("data", "image_column", "first"),
        ("data", "image_dropout", 0.1),
        ("data", "image_noise", False),
        ("data", "image_noise", True),
        ("data", "classes", ["cat"]),
        ("validation", "images", ["a.png"]),
    ],
)
def test_text_to_video_refuses_what_is_about_images(
    recipe_values: dict[str, Any], section: str, name: str, value: Any
) -> None:
    for_recipe(recipe_values)
    recipe_values[section][name] = value
    with pytest.raises(DitLoraError, match=rf"{section}\.{name}.*remove it"):
        for_recipe(recipe_values)


def test_sampling_needs_an_image_exactly_where_the_model_starts_from_one(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    picture = tmp_path / "first.png"
    Image.new("RGB", (96, 64), "red").save(picture)
    sampling = Sampling(VideoShape(9, 64, 96), 1, 1.0, 0)
    with pytest.raises(DitLoraError, match="is image-to-video: give the first image with --image"):
        open_checkpoint(tiny_checkpoints["cogvideox-5b-i2v"]).sampler.generate(None, {}, sampling)
    with pytest.raises(DitLoraError, match=r"starts from no image; remove --image"):
        open_checkpoint(tiny_checkpoints["cogvideox-1.5"]).sampler.generate(None, {}, replace(sampling, image=picture))


@pytest.mark.parametrize("variant", ["cogvideox-1.5", "cogvideox-1.5-i2v"])
def test_a_sample_has_the_frames_asked_for(tiny_checkpoints: dict[str, Path], tmp_path: Path, variant: str) -> None:
    """The frame in front is dropped; an image of another size is scaled to cover and cropped."""
    picture = tmp_path / "first.png"
    Image.new("RGB", (300, 100), "red").save(picture)
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    image = picture if variant.endswith("i2v") else None
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    sampling = Sampling(VideoShape(9, 32, 48), 1, 1.0, 0, image)
    video = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a"), sampling)
    assert video.shape == (9, 32, 48, 3)


def test_from_scratch_changes_what_shapes_and_positions_follow(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["cogvideox-1.5"]
    checkpoint = open_checkpoint(path, from_scratch={"num_layers": 1, "sample_height": 4})
    torch.manual_seed(0)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    assert len(transformer.transformer_blocks) == 1
    torch.manual_seed(1)
    other_transformer = checkpoint.denoiser.load_transformer(torch.float32)
    assert not torch.equal(transformer.proj_out.weight, other_transformer.proj_out.weight)
    with pytest.raises(DitLoraError, match="height can be 32 at most"):
        checkpoint.info.check_shape(VideoShape(9, 48, 96))
    with pytest.raises(DitLoraError, match=r"does not know\n  - depth"):
        open_checkpoint(path, from_scratch={"depth": 1})
    with pytest.raises(DitLoraError, match="in_channels must be 4; got 8"):
        open_checkpoint(path, from_scratch={"in_channels": 8})


def test_configs_that_leave_out_what_came_later_are_read(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """1.0's published files know no patch_size_t and no ofs_embed_dim."""
    import json

    path = Path(shutil.copytree(tiny_checkpoints["cogvideox-5b"], tmp_path / "model"))
    file = path / "transformer" / "config.json"
    config = json.loads(file.read_text())
    for name in (
        "patch_size_t",
        "ofs_embed_dim",
        "patch_bias",
        "use_learned_positional_embeddings",
    ):
        del config[name]
    file.write_text(json.dumps(config))
    checkpoint = open_checkpoint(path)
    checkpoint.info.check_shape(VideoShape(9, 64, 96))
    batch = {name: tensor for name, tensor in random_batch().items() if "image" not in name}
    output = checkpoint.denoiser.losses(
        checkpoint.denoiser.load_transformer(torch.float32), batch, RandomStreams(SEED, POSITIONS)
    )
    assert torch.isfinite(output.losses).all()
