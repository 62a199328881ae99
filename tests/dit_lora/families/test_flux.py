"""FLUX.1's and FLUX.2's own facts, recomputed apart from their code, in fp64 where there is arithmetic."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_cases.subject import EVERY, adapted, open_subject
from flux_cases import CPU, FAMILY, every_variant, open_checkpoint
from peft.tuners.lora import LoraLayer
from PIL import Image
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.commands.verify import find_target
from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import LoraConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.references import scale_image
from dit_lora.numerics.streams import RandomStreams, make_generator
from dit_lora.training.tasks.diffusion.second_model import open_sampling_checkpoint

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


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config."""
    shutil.copytree(tiny, out)
    names = {"": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
    file = out / names.get(component, f"{component}/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


def recipe_for(path: Path, values: dict[str, Any], **sections: Any) -> Recipe:
    family = FAMILY.get(path.name, "flux2")
    data = {"path": ".", "height": 64, "width": 96}
    changes = {"data": data, "model": {"family": family, "path": str(path)}, **sections}
    return parse_recipe({**values, **changes}, "test")


def some_batch(checkpoint: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Three samples of 4 x 6 latents and 512 tokens."""
    g = torch.Generator().manual_seed(0)
    batch = {"latent_mean": torch.randn(3, 4, 4, 6, generator=g)}
    for name, (size, _) in checkpoint.encoders.text_spec(dtype).items():
        batch[name] = torch.randn(3, *size, generator=g).to(dtype)
    if "flux2" not in checkpoint.path.name:
        batch["latent_logvar"] = torch.randn(3, 4, 4, 6, generator=g)
    return batch


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


@every_variant
def test_noising_target_and_loss_equal_an_fp64_computation(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """Posterior draw, scale, packing, noise level, timestep, velocity, mean: each from its own stream."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    batch = some_batch(checkpoint)
    model = Recorder(torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(2)))
    output = checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))

    latents = batch["latent_mean"].double()
    if "latent_logvar" in batch:
        spread = (batch["latent_logvar"].double() / 2).exp()
        latents = (latents + spread * own_draws((4, 4, 6), "posterior") - 0.1159) * 0.3611
    squares = [latents[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] for r in (0, 1) for c in range(3)]
    clean = torch.stack([square.flatten(1) for square in squares], dim=1)
    level = 1 / (1 + (-own_draws((), "timestep")).exp())
    # The line through (256, 0.5) and (4096, 1.15), at 6 tokens.
    shift = 1.0 if variant == "flux-schnell" else math.exp(0.5 - 250 * 0.65 / 3840)
    sigma = shift / (shift + 1 / level - 1)
    noise = own_draws((6, 16), "noise")
    by_sample = sigma.view(3, 1, 1)
    expected = {
        "hidden_states": clean + by_sample * (noise - clean),
        "timestep": sigma,
        "encoder_hidden_states": batch["prompt_embeds"].double(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(model.asked[name].double(), value, rtol=2e-6, atol=2e-6)
    losses = (model.answer.double() - (noise - clean)).square().mean((1, 2))
    torch.testing.assert_close(output.losses.double(), losses, rtol=2e-6, atol=0)
    assert output.timesteps.tolist() == [math.floor(t) for t in (1000 * sigma).tolist()]


@every_variant
def test_the_timestep_is_rounded_before_it_is_divided(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """In bf16 another order gives other bits: the pipelines' is t.to(bf16) / 1000."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    batch = some_batch(checkpoint, torch.bfloat16)
    model, t = Recorder(torch.zeros(3, 6, 16)), torch.tensor([371.3, 804.9, 5.99])
    checkpoint.denoiser.predict(model, torch.randn(3, 6, 16), t, batch)
    timestep = model.asked["timestep"]
    assert torch.equal(timestep, t.bfloat16() / 1000)
    assert not torch.equal(timestep, (t / 1000).bfloat16())
    assert model.asked["hidden_states"].dtype is torch.bfloat16
    # FLUX.1's positions are in the text's dtype, FLUX.2's are integers.
    ids = torch.bfloat16 if FAMILY[variant] == "flux" else torch.int64
    assert model.asked["img_ids"].dtype is model.asked["txt_ids"].dtype is ids


@every_variant
def test_the_shift_is_the_pipelines_at_ten_sizes(
    tiny_checkpoints: dict[str, Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mu that the pipeline passes to its scheduler. FLUX.2 trains on FLUX.1's line, schnell without a shift."""
    path = tiny_checkpoints[variant]
    checkpoint, pipeline = open_checkpoint(path), DiffusionPipeline.from_pretrained(path)
    batch = {name: tensor[:1] for name, tensor in some_batch(checkpoint).items()}
    scales: list[float] = []

    class StopHereError(Exception):
        pass

    def set_timesteps(sigmas: Any, device: Any, mu: float) -> None:
        scales.append(mu)
        raise StopHereError

    monkeypatch.setattr(pipeline.scheduler, "set_timesteps", set_timesteps)
    for step in range(1, 11):
        height, width = 192 * step, 256 + 64 * step
        kwargs = {"height": height, "width": width, **checkpoint.sampler.prompt_kwargs(text_of(batch))}
        with pytest.raises(StopHereError):
            pipeline(**kwargs)
        size = torch.Size([4, height // 8, width // 8])
        mu = scales[-1]
        if FAMILY[variant] == "flux2":
            mu = pytest.approx(0.5 + (12 * step * (16 + 4 * step) - 256) * 0.65 / 3840)
        assert checkpoint.denoiser.compute_shift_mu(size) == mu
        shift = 1.0 if variant == "flux-schnell" else math.exp(checkpoint.denoiser.compute_shift_mu(size))
        assert checkpoint.denoiser.compute_shift(size) == shift
    assert len(set(scales)) == 10


def text_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in batch.items() if "prompt" in name}


@pytest.mark.parametrize("variant", ["flux-dev", "flux2-dev"])
@pytest.mark.parametrize("value", [None, 3.5])
def test_guidance_is_embedded_at_the_recipes_value_and_recorded(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    variant: str,
    value: float | None,
) -> None:
    path = tiny_checkpoints[variant]
    train = recipe_values["train"] | ({} if value is None else {"guidance_scale": value})
    recipe = recipe_for(path, recipe_values, train=train)
    checkpoint = open_checkpoint(path).apply_recipe(recipe)
    expected = 1.0 if value is None else value
    model, batch = Recorder(torch.zeros(3, 6, 16)), some_batch(checkpoint, torch.bfloat16)
    checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))
    assert torch.equal(model.asked["guidance"], torch.full([3], expected))
    assert checkpoint.info.training_metadata() == {"guidance_scale": expected}
    assert any(f"guidance of {expected:g}" in line for line in checkpoint.info.recipe_notes(recipe))


@pytest.mark.parametrize("variant", ["flux-schnell", "flux2-klein"])
def test_a_guidance_value_is_refused_where_nothing_embeds_it(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any], variant: str
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint = open_checkpoint(path)
    train = recipe_values["train"]
    with pytest.raises(DitLoraError, match=r"train.guidance_scale: .* has no guidance embedding"):
        checkpoint.apply_recipe(recipe_for(path, recipe_values, train={**train, "guidance_scale": 1.0}))
    recipe = recipe_for(path, recipe_values)
    model = Recorder(torch.zeros(3, 6, 16))
    plain = checkpoint.apply_recipe(recipe)
    plain.losses(model, some_batch(plain), RandomStreams(SEED, POSITIONS))
    assert model.asked["guidance"] is None
    assert plain.info.training_metadata() == {}
    notes = " ".join(plain.info.recipe_notes(recipe))
    assert ("FLUX.1-dev is the usual base" in notes) == (variant == "flux-schnell")
    assert plain.info.recipe_notes(recipe_for(path, recipe_values, train={**train, "target": "guided"})) == []


def test_a_distilled_klein_is_refused_by_name_and_still_samples(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, recipe_values: dict[str, Any]
) -> None:
    """Unless something under the adapter undoes it or the target is guided; and it samples for its base."""
    base = tiny_checkpoints["flux2-klein"]
    path = changed(base, tmp_path / "klein-4b", "", is_distilled=True)
    family, recipe = get_family("flux2"), recipe_for(path, recipe_values)
    with pytest.raises(DitLoraError, match=r"klein-4b is step-distilled.*FLUX.2-klein-base-4B"):
        family.open(recipe.model, recipe)
    lora = {"rank": 4, "under": [{"path": "theirs.safetensors"}]}
    family.open(recipe.model, recipe_for(path, recipe_values, lora=lora))
    guided = {**recipe_values["train"], "target": "guided"}
    family.open(recipe.model, recipe_for(path, recipe_values, train=guided))
    training = recipe_for(base, recipe_values, validation={"model": str(path), "prompts": ["a cat"]})
    second: Any = open_sampling_checkpoint(training, family.open(training.model, training))
    assert second.info.is_distilled
    pipeline = second.sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    sampling = Sampling(VideoShape(1, 32, 64), inference_steps=1, guidance_scale=1.0, seed=3)
    assert second.sampler.generate(pipeline, second.sampler.prompt_kwargs("a cat"), sampling).shape == (
        1,
        32,
        64,
        3,
    )


@pytest.mark.parametrize(
    ("component", "values", "words"),
    [
        ("scheduler", {"_class_name": "DDIMScheduler"}, "scheduler DDIMScheduler is not the one"),
        ("scheduler", {"time_shift_type": "linear"}, "time_shift_type=linear"),
        ("", {"_class_name": "FluxFillPipeline"}, "a FluxFillPipeline checkpoint"),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    component: str,
    values: dict[str, Any],
    words: str,
) -> None:
    path = changed(tiny_checkpoints["flux-dev"], tmp_path / "m", component, **values)
    with pytest.raises(DitLoraError, match=words):
        open_checkpoint(path)


@every_variant
def test_pictures_are_encoded_in_fp32_whatever_the_policy(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """FLUX.2's statistics would be rounded in bf16; the mode is kept, as the pipeline takes of its references."""
    path = tiny_checkpoints[variant]
    checkpoint = open_checkpoint(path)
    pixels = torch.randint(0, 256, (1, 3, 32, 64)).to(torch.uint8)
    full = checkpoint.encoders.load_video_encoder(torch.float32, CPU)(pixels)
    half = checkpoint.encoders.load_video_encoder(torch.bfloat16, CPU)(pixels)
    for name, tensor in full.items():
        assert tensor.dtype is half[name].dtype is torch.float32
        assert torch.equal(tensor, half[name])
    vae = DiffusionPipeline.from_pretrained(path).vae
    with torch.no_grad():
        posterior: DiagonalGaussianDistribution = vae.encode(pixels / 127.5 - 1).latent_dist
    if FAMILY[variant] == "flux":
        assert torch.equal(full["latent_mean"], posterior.mean[0])
        assert torch.equal(full["latent_logvar"], posterior.logvar[0])
        return
    assert full.keys() == {"latent_mean"}
    std, mean = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt(), vae.bn.running_mean
    # Channel c's squares of two by two are the statistics' channels 4 c to 4 c + 3, by rows.
    mean, std = (table.view(4, 2, 2).repeat(1, 2, 4) for table in (mean, std))
    expected = (posterior.mode()[0] - mean) / std
    torch.testing.assert_close(full["latent_mean"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("resolution", "expected"), [(None, (1024, 1024)), (512, (512, 512)), (1100, (1088, 1088))])
def test_reference_resolution_sets_flux2s_limit_in_training_and_in_samples(
    tiny_checkpoints: dict[str, Path], resolution: int | None, expected: tuple[int, int]
) -> None:
    """Sides are multiples of 16; the stock pipeline's limit is 1024x1024."""
    opened = open_checkpoint(tiny_checkpoints["flux2-klein"])
    checkpoint = opened.copy_with_training_metadata({"reference_resolution": resolution})
    shape = checkpoint.info.reference_spec.encoded_shape(1200, 1200, VideoShape(1, 64, 64))
    assert (shape.height, shape.width) == expected
    picture = Image.new("RGB", (1200, 1200), "red")
    encode = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    encoded = encode.encode_references([pixels], VideoShape(1, 64, 64))["reference_0"]
    assert encoded.shape[-2:] == (expected[0] // 8, expected[1] // 8)
    pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    sent = scale_image(picture, resolution)
    if sent.width * sent.height > 1024 * 1024:
        sent = pipeline.image_processor._resize_to_target_area(sent, 1024 * 1024)
    assert (sent.height // 16 * 16, sent.width // 16 * 16) == expected


@pytest.mark.parametrize(("layers", "single"), [(1, 3), (2, 12)])
def test_flux2s_targets_follow_the_number_of_its_blocks(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, layers: int, single: int
) -> None:
    """Every attention's own projections and the single blocks' two layers; never a head, a modulation or a list."""
    tiny = tiny_checkpoints["flux2-klein"]
    config = {"num_layers": layers, "num_single_layers": single}
    path = changed(tiny, tmp_path / "m", "transformer", **config)
    checkpoint = open_checkpoint(path)
    model = checkpoint.denoiser.transformer_class.from_config(checkpoint.info.transformer_config)
    targets = checkpoint.info.lora_targets(get_family("flux2").lora_targets)
    attach_lora(model, LoraConfig(rank=2), targets, seed=0)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    double = {
        f"transformer_blocks.{i}.attn.{name}" for i in range(layers) for name in ("to_q", "to_k", "to_v", "to_out.0")
    }
    joined = {
        f"single_transformer_blocks.{i}.attn.{name}" for i in range(single) for name in ("to_qkv_mlp_proj", "to_out")
    }
    assert adapted == double | joined


def test_flux1s_targets_leave_out_the_head(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints["flux-dev"])
    model = checkpoint.denoiser.load_transformer(torch.float32)
    targets = checkpoint.info.lora_targets(get_family("flux").lora_targets)
    attach_lora(model, LoraConfig(rank=2), targets, seed=0)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert len(adapted) == 2 * 12 + 2 * 3
    assert not any("proj_out" in name or "norm" in name for name in adapted)


@pytest.mark.parametrize("variant", ["flux-dev", "flux2-klein", "flux2-dev"])
def test_guidance_from_cached_text_equals_guidance_from_words(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    sampling = Sampling(VideoShape(1, 32, 64), inference_steps=2, guidance_scale=4.5, seed=3)
    full_pipeline = checkpoint.sampler.pipeline(torch.float32)
    cached = checkpoint.sampler.pipeline(torch.float32, full_pipeline.transformer, text=False)
    calls: list[int] = []
    for pipeline in (full_pipeline, cached):
        pipeline.set_progress_bar_config(disable=True)
    full_pipeline.transformer.register_forward_pre_hook(
        lambda _m, _args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    video_of_text = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
    # klein calls it once more for "", and none makes a batch of two.
    assert calls == [1] * (4 if variant == "flux2-klein" else 2)
    tensors = checkpoint.sampler.generate(
        cached, checkpoint.sampler.prompt_kwargs(encode(["a cat"]), encode([""])), sampling
    )
    assert video_of_text.shape == (1, 32, 64, 3)
    assert video_of_text.float().std() > 1
    assert torch.equal(video_of_text, tensors)


def test_a_header_says_at_which_guidance_its_output_is_compared(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`dit-lora verify` would find another base at the default."""
    path = tiny_checkpoints["flux-dev"]
    transformer = adapted(open_subject(EVERY["flux-dev"], path))
    metadata = {"family": "flux", "base_model": path.name, "guidance_scale": 3.5}
    save_adapter(transformer, FluxPipeline, tmp_path, metadata)
    stock: Any = find_target(tmp_path, str(path)).open_reference_model()
    assert stock.checkpoint.info.guidance == 3.5
