"""CogVideoX's own facts, recomputed apart from its code, in fp64 where there is arithmetic."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.cache.digests import Digests
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.numerics.streams import RandomStreams, make_generator

CPU = torch.device("cpu")
SEED, POSITIONS = 11, [3, 400, 21]


class Recorder(nn.Module):
    """Answers with a fixed prediction and keeps what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = kwargs
        return (self.answer,)


def open_checkpoint(path: Path) -> Any:
    return get_family("cogvideox").open(ModelConfig(family="cogvideox", path=str(path)))


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


@pytest.mark.parametrize("variant", ["cogvideox-2b", "cogvideox-5b"])
def test_noising_target_and_loss_equal_an_fp64_computation_by_diffusers_scheduler(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """Posterior draw, latent scale, noise, timestep, v-target, mean: each from its own stream."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    g = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 4, 3, 4, 6, generator=g) for _ in range(2))
    text = torch.randn(3, 226, 32, generator=g)
    model = Recorder(torch.randn(3, 3, 4, 4, 6, generator=g))
    batch = {"latent_mean": mean, "latent_logvar": logvar, "prompt_embeds": text}
    output = checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))

    scheduler = CogVideoXDPMScheduler.from_pretrained(tiny_checkpoints[variant], subfolder="scheduler")
    scale = AutoencoderKLCogVideoX.load_config(tiny_checkpoints[variant], subfolder="vae")["scaling_factor"]
    std = (0.5 * logvar.double()).exp()
    sample = mean.double() + std * own_draws((4, 3, 4, 6), "posterior")
    clean = sample.transpose(1, 2) * scale
    noise = own_draws((4, 3, 4, 6), "noise").transpose(1, 2)
    timesteps = torch.cat(
        [torch.randint(0, 1000, (1,), generator=make_generator(SEED, "timestep", p)) for p in POSITIONS]
    )
    assert torch.equal(output.timesteps, timesteps)
    assert torch.equal(model.asked["timestep"], timesteps)
    assert torch.equal(model.asked["encoder_hidden_states"], text)
    expected = scheduler.add_noise(clean, noise, timesteps)
    torch.testing.assert_close(model.asked["hidden_states"].double(), expected, rtol=1e-5, atol=1e-5)
    target = scheduler.get_velocity(clean, noise, timesteps)
    losses = (model.answer.double() - target).square().flatten(1).mean(1)
    torch.testing.assert_close(output.losses.double(), losses, rtol=1e-5, atol=0)


def test_timesteps_are_uniform_over_the_whole_schedule(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints["cogvideox-2b"])
    count = 2000
    batch = {
        "latent_mean": torch.zeros(count, 1, 1, 2, 2),
        "latent_logvar": torch.zeros(count, 1, 1, 2, 2),
        "prompt_embeds": torch.zeros(count, 1, 1),
    }
    output = checkpoint.denoiser.losses(Recorder(torch.zeros(1, 1, 1, 1, 1)), batch, RandomStreams(0, range(count)))
    assert output.timesteps.min() < 5
    assert output.timesteps.max() > 994
    assert abs(output.timesteps.float().mean() - 499.5) < 4 * 1000 / (12 * count) ** 0.5


def test_the_cache_holds_the_vaes_posterior_of_pixels_from_minus_one_to_one(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["cogvideox-2b"]
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (9, 3, 32, 48), generator=g).to(torch.uint8)
    encoded = open_checkpoint(path).encoders.load_video_encoder(torch.float32, CPU)(pixels)
    vae = AutoencoderKLCogVideoX.from_pretrained(path, subfolder="vae")
    with torch.no_grad():
        posterior = vae.encode((pixels.float() / 127.5 - 1).permute(1, 0, 2, 3)[None]).latent_dist
    assert torch.equal(encoded["latent_mean"], posterior.mean[0])
    assert torch.equal(encoded["latent_logvar"], posterior.logvar[0])
    assert not encoded["latent_mean"].requires_grad


@pytest.mark.parametrize(
    ("facts", "file"),
    [
        ("latent_cache_key", "vae/config.json"),
        ("latent_cache_key", "vae/diffusion_pytorch_model.safetensors"),
        ("text_cache_key", "text_encoder/model.safetensors"),
        ("text_cache_key", "tokenizer/tokenizer.json"),
    ],
)
def test_a_changed_file_of_an_encoder_changes_what_its_entries_are_keyed_by(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, facts: str, file: str
) -> None:
    path = Path(shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "model"))

    def key() -> list[str]:
        values = getattr(open_checkpoint(path).encoders, facts)().values()
        digests = Digests(tmp_path / "memo.json")
        return [digests.hash_component(v) if isinstance(v, Path) else str(v) for v in values]

    before = key()
    data = (path / file).read_bytes()
    # A trailing space in JSON, another last weight in safetensors: both still load.
    changed = data + b" " if file.endswith(".json") else data[:-1] + bytes([data[-1] ^ 1])
    (path / file).write_bytes(changed)
    assert key() != before


def test_sampling_passes_on_every_setting(tiny_checkpoints: dict[str, Path]) -> None:
    call_kwargs: dict[str, Any] = {}

    class Pipeline:
        def __call__(self, **kwargs: Any) -> Any:
            call_kwargs.update(kwargs)
            frames = torch.linspace(0, 1, 2 * 2 * 2 * 3).view(1, 2, 2, 2, 3).numpy()
            return type("Output", (), {"frames": frames})

    checkpoint = open_checkpoint(tiny_checkpoints["cogvideox-2b"])
    sampling = Sampling(VideoShape(13, 32, 48), inference_steps=7, guidance_scale=2.5, seed=5)
    video = checkpoint.sampler.generate(Pipeline(), {"prompt": "x"}, sampling)
    assert {name: call_kwargs[name] for name in ("prompt", "num_frames", "height", "width")} == {
        "prompt": "x",
        "num_frames": 13,
        "height": 32,
        "width": 48,
    }
    assert (call_kwargs["num_inference_steps"], call_kwargs["guidance_scale"]) == (7, 2.5)
    assert call_kwargs["max_sequence_length"] == 226
    assert call_kwargs["generator"].initial_seed() == 5
    assert video.dtype is torch.uint8
    assert (video.min(), video.max()) == (0, 255)
