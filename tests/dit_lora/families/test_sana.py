"""Sana's own facts, recomputed apart from its code, in fp64 where there is arithmetic."""

import json
import math
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from diffusers import SanaPipeline
from torch import nn

from dit_lora.adapters.attach import attach_lora, is_lora_a
from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.adapters.load import load_adapter
from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.numerics.streams import RandomStreams, make_generator

CPU = torch.device("cpu")
SEED, POSITIONS = 11, [3, 400, 21]


class Recorder(nn.Module):
    """Answers with a fixed prediction and keeps what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = {"hidden_states": hidden_states, **kwargs}
        return (self.answer,)


def open_checkpoint(path: Path, **scratch: Any) -> Any:
    family = json.loads((path / "model_index.json").read_text())["_class_name"]
    name = "sana_video" if "Video" in family else "sana"
    return get_family(name).open(ModelConfig(family=name, path=str(path), **scratch))


def own_draws(shape: tuple[int, ...], stream: str) -> torch.Tensor:
    draws = [torch.randn(shape, generator=make_generator(SEED, stream, p)) for p in POSITIONS]
    return torch.stack(draws).double()


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config."""
    shutil.copytree(tiny, out)
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    file = out / component / name if component else out / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


@pytest.mark.parametrize("variant", ["sana-600m", "sana-video"])
def test_noising_target_and_loss_equal_an_fp64_computation(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """Posterior draw, latent scale, noise level, timestep, velocity, mean: each from its own stream."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    video = variant == "sana-video"
    shape = (4, 3, 4, 6) if video else (4, 4, 6)
    g = torch.Generator().manual_seed(0)
    mean, logvar, answer = (torch.randn(3, *shape, generator=g) for _ in range(3))
    batch = {
        "latent_mean": mean,
        "prompt_embeds": torch.randn(3, 300, 32, generator=g),
        "prompt_attention_mask": torch.ones(3, 300, dtype=torch.int64),
    }
    batch["prompt_attention_mask"][1, 250:] = 0
    batch |= {"latent_logvar": logvar} if video else {}
    model = Recorder(answer)
    output = checkpoint.denoiser.losses(model, batch, RandomStreams(SEED, POSITIONS))

    if video:
        latents = mean.double() + (logvar.double() / 2).exp() * own_draws(shape, "posterior")
        per_channel = (4, 1, 1, 1)
        offset = torch.tensor([-0.2, 0.3, 0.1, -0.4], dtype=torch.float64).view(per_channel)
        spread = torch.tensor([0.8, 1.3, 0.6, 1.1], dtype=torch.float64).view(per_channel)
        clean = (latents - offset) / spread
    else:
        clean = 0.41407 * mean.double()
    shift = 3.0  # SANA-Video's too, though its scheduler samples at 8
    level = 1 / (1 + (-own_draws((), "timestep")).exp())
    sigma = shift / (shift + 1 / level - 1)  # the shift, written otherwise
    noise = own_draws(shape, "noise")
    by_sample = sigma.view(3, *[1] * len(shape))
    expected = {
        "hidden_states": clean + by_sample * (noise - clean),
        "timestep": 1000 * sigma,
    }
    for name, value in expected.items():
        torch.testing.assert_close(model.asked[name].double(), value, rtol=2e-6, atol=2e-6)
        assert model.asked[name].dtype is torch.float32
    losses = (answer.double() - (noise - clean)).square().flatten(1).mean(1)
    torch.testing.assert_close(output.losses.double(), losses, rtol=1e-6, atol=0)
    assert output.timesteps.tolist() == [math.floor(t) for t in (1000 * sigma).tolist()]
    bias = -10000.0 * (1 - batch["prompt_attention_mask"].float())
    assert torch.equal(model.asked["encoder_attention_mask"], bias[:, None])


def test_noise_levels_are_logit_normal_and_shifted() -> None:
    """Deciles 1, 5 and 9 at shift 3: 0.454, 0.750, 0.915 (without the shift 0.217, 0.5, 0.783)."""
    objective = FlowMatching(shift=3.0, num_train_timesteps=1000)
    normal = NormalDist()
    points = torch.tensor([normal.inv_cdf(p) for p in (0.1, 0.5, 0.9)])
    assert objective.compute_sigmas(points).tolist() == pytest.approx([0.4544, 0.7500, 0.9153], abs=1e-4)
    gaussian = torch.cat([torch.randn(1, generator=make_generator(0, "timestep", n)) for n in range(4000)])
    deciles = objective.compute_sigmas(gaussian).quantile(torch.tensor([0.1, 0.5, 0.9]))
    assert deciles.tolist() == pytest.approx([0.454, 0.750, 0.915], abs=0.02)
    assert objective.compute_sigmas(gaussian).mean().item() == pytest.approx(0.714, abs=0.01)
    extreme = objective.compute_sigmas(torch.tensor([-20.0, 20.0]))
    assert objective.convert_to_timesteps(extreme).tolist() == [0, 999]


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        ({"flow_shift": 6.0}, 6.0),
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 8.0}, 8.0),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "flow_shift": 3.0, "shift": 4.0}, 4.0),
    ],
)
def test_the_shift_is_the_checkpoints_own(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, scheduler: dict[str, Any], shift: float
) -> None:
    assert open_checkpoint(tiny_checkpoints["sana-600m"]).denoiser.objective.shift == 3.0
    path = changed(tiny_checkpoints["sana-600m"], tmp_path / "m", "scheduler", **scheduler)
    assert open_checkpoint(path).denoiser.objective == FlowMatching(shift, 1000)


@pytest.mark.parametrize(
    ("component", "values", "words"),
    [
        ("scheduler", {"prediction_type": "epsilon"}, "predicts the flow.*prediction_type=epsilon"),
        ("scheduler", {"use_flow_sigmas": False}, "use_flow_sigmas=False"),
        ("scheduler", {"_class_name": "SCMScheduler"}, "scheduler SCMScheduler is not one"),
        (
            "scheduler",
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True},
            "shifts by image size",
        ),
        (
            "",
            {"_class_name": "SanaSprintPipeline"},
            "a SanaSprintPipeline checkpoint.*SanaPipeline",
        ),
        ("", {"_class_name": "SanaControlNetPipeline"}, "a SanaControlNetPipeline checkpoint"),
    ],
)
def test_a_checkpoint_that_contradicts_the_family_is_refused(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    component: str,
    values: dict[str, Any],
    words: str,
) -> None:
    path = changed(tiny_checkpoints["sana-600m"], tmp_path / "m", component, **values)
    with pytest.raises(DitLoraError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("component", "values", "words"),
    [
        ("", {"_class_name": "SanaImageToVideoPipeline"}, "SanaImageToVideoPipeline.*sana_video"),
        ("vae", {"_class_name": "AutoencoderKLLTX2Video"}, "autoencoder AutoencoderKLLTX2Video"),
        ("scheduler", {"prediction_type": "v_prediction"}, "prediction_type=v_prediction"),
    ],
)
def test_a_video_checkpoint_of_another_kind_is_refused_by_name(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    component: str,
    values: dict[str, Any],
    words: str,
) -> None:
    path = changed(tiny_checkpoints["sana-video"], tmp_path / "m", component, **values)
    with pytest.raises(DitLoraError, match=words):
        get_family("sana_video").open(ModelConfig(family="sana_video", path=str(path)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"height": 48}, "height must be a multiple of 32; got 48, nearest 32 and 64"),
        ({"frames": 9, "fps": 8}, "frames must be 1, Sana makes images; got 9"),
        ({"fps": 8}, "data.fps: family sana does not use this"),
        ({"image_dropout": 0.1}, "data.image_dropout"),
        ({"image_noise": False}, "data.image_noise"),
    ],
)
def test_a_recipe_that_sana_cannot_train_is_refused(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    data: dict[str, Any],
    words: str,
) -> None:
    path = tiny_checkpoints["sana-600m"]
    sizes = {"path": ".", "height": 64, "width": 96}
    recipe_values |= {"data": {**sizes, **data}, "model": {"family": "sana", "path": str(path)}}
    with pytest.raises(DitLoraError, match=words):
        open_checkpoint(path).apply_recipe(parse_recipe(recipe_values, "test"))


@pytest.mark.parametrize("variant", ["sana-600m", "sana-video"])
def test_captions_are_encoded_as_the_pipeline_does_with_its_instruction_and_none_without(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """`""` is the negative prompt of its guidance; all have 300 tokens, in a batch as alone."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    pipeline = checkpoint.info.pipeline_class.from_pretrained(tiny_checkpoints[variant], transformer=None)
    calls: list[dict[str, Any]] = []
    original = pipeline.encode_prompt

    class StopHereError(Exception):
        pass

    def spy(prompt: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(
            dict(
                zip(
                    ("embeds", "mask", "negative", "negative_mask"),
                    original(prompt, *args, **kwargs),
                    strict=True,
                )
            )
        )
        raise StopHereError

    pipeline.encode_prompt = spy
    captions = ["A Red cat on\na mat", "", "fish"]
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(captions)
    assert encoded["prompt_embeds"].shape == (3, 300, 32)
    assert encoded["prompt_attention_mask"].shape == (3, 300)
    for index in (0, 2):
        with pytest.raises(StopHereError):
            pipeline(captions[index], use_resolution_binning=False)
        for name, theirs in (("prompt_embeds", "embeds"), ("prompt_attention_mask", "mask")):
            assert torch.equal(encoded[name][index], calls[-1][theirs][0])
    assert torch.equal(encoded["prompt_embeds"][1], calls[-1]["negative"][0])
    assert torch.equal(encoded["prompt_attention_mask"][1], calls[-1]["negative_mask"][0])
    # No instruction: the beginning of text alone. With it: that, its last token, and the caption's own.
    assert encoded["prompt_attention_mask"].sum(1).tolist() == [20, 1, 6]


def test_the_instruction_is_part_of_a_captions_cache_key(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints["sana-600m"])
    before = checkpoint.encoders.text_cache_key()
    json.dumps({name: str(value) for name, value in before.items()})
    assert before["tokens"] == 300
    assert before["instruction"][-1] == "User Prompt: "

    def called(self: Any, max_sequence_length: int = 7, complex_human_instruction: Any = ()) -> None:
        """Stands in for the pipeline's call of another version."""

    monkeypatch.setattr(SanaPipeline, "__call__", called)
    assert checkpoint.encoders.text_cache_key() != before


@pytest.mark.parametrize("variant", ["sana-600m", "sana-video"])
def test_guidance_from_cached_text_equals_guidance_from_words(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    frames = 9 if variant == "sana-video" else 1
    sampling = Sampling(VideoShape(frames, 32, 64), inference_steps=2, guidance_scale=4.5, seed=3)
    full_pipeline = checkpoint.sampler.pipeline(torch.float32)
    cached = checkpoint.sampler.pipeline(torch.float32, full_pipeline.transformer, text=False)
    for pipeline in (full_pipeline, cached):
        pipeline.set_progress_bar_config(disable=True)
    sizes: list[torch.Size] = []
    hook = full_pipeline.transformer.register_forward_pre_hook(lambda _m, args: sizes.append(args[0].shape))
    video_of_text = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs("a cat"), sampling)
    hook.remove()
    # The shape that was asked for is denoised, not the pipeline's nearest one and then resized.
    assert {tuple(size[-2:]) for size in sizes} == {(4, 8) if frames > 1 else (2, 4)}
    prompt_kwargs = checkpoint.sampler.prompt_kwargs(encode(["a cat"]), encode([""]))
    tensors = checkpoint.sampler.generate(cached, prompt_kwargs, sampling)
    assert video_of_text.shape == (frames, 32, 64, 3)
    assert video_of_text.float().std() > 1
    assert torch.equal(video_of_text, tensors)


@pytest.mark.parametrize("variant", ["sana-600m", "sana-video"])
def test_the_autoencoder_stays_fp32_where_the_policy_is_bf16(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    pixels = torch.randint(0, 256, (9 if variant == "sana-video" else 1, 3, 32, 64)).to(torch.uint8)
    full = checkpoint.encoders.load_video_encoder(torch.float32, CPU)(pixels)
    half = checkpoint.encoders.load_video_encoder(torch.bfloat16, CPU)(pixels)
    for name, tensor in full.items():
        assert tensor.dtype is half[name].dtype is torch.float32
        assert torch.equal(tensor, half[name])
    pipeline = checkpoint.sampler.pipeline(torch.bfloat16)
    assert pipeline.vae.dtype is torch.float32
    assert pipeline.text_encoder.dtype is pipeline.transformer.dtype is torch.bfloat16


def test_the_timestep_is_scaled_as_the_config_says(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = changed(tiny_checkpoints["sana-600m"], tmp_path / "m", "transformer", timestep_scale=0.001)
    model = Recorder(torch.zeros(2, 4, 4, 6))
    batch = {"prompt_embeds": torch.zeros(2, 1, 32), "prompt_attention_mask": torch.ones(2, 1)}
    open_checkpoint(path).denoiser.predict(model, torch.zeros(2, 4, 4, 6), torch.tensor([500.0, 7.0]), batch)
    torch.testing.assert_close(model.asked["timestep"], torch.tensor([0.5, 0.007]))


@pytest.mark.parametrize("variant", ["sana-600m", "sana-video"])
def test_the_mix_ffn_can_be_adapted_too_and_loads_in_the_stock_pipeline(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    targets = ("to_q", "conv_inverted", "conv_point")
    lora = LoraConfig(rank=3, alpha=5, targets=targets)
    report = attach_lora(transformer, lora, (), seed=0)
    assert "4 of 22 linear layers and 4 convolutions" in str(report)
    shape = (4, 3, 4, 6) if variant == "sana-video" else (4, 4, 6)
    g = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(2, *shape, generator=g) for name in ("latent_mean", "latent_logvar")}
    batch |= {
        "prompt_embeds": torch.randn(2, 300, 32, generator=g),
        "prompt_attention_mask": torch.ones(2, 300, dtype=torch.int64),
    }
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for step in range(2):  # A gets a gradient once B has moved
        optimizer.zero_grad()
        checkpoint.denoiser.losses(transformer, batch, RandomStreams(step, [0, 1])).losses.mean().backward()
        optimizer.step()
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.any(), name
    assert sum(is_lora_a(name) for name, _ in transformer.named_parameters()) == 8
    save_adapter(transformer, checkpoint.info.pipeline_class, tmp_path, {})
    pipeline = checkpoint.info.pipeline_class.from_pretrained(tiny_checkpoints[variant])
    load_adapter(pipeline, tmp_path)
    with torch.no_grad():
        ours, theirs = (
            checkpoint.denoiser.losses(m.eval(), batch, RandomStreams(0, [4, 5])).losses
            for m in (transformer, pipeline.transformer)
        )
    assert torch.equal(ours, theirs)


def test_from_scratch_draws_a_network_of_the_changed_config(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """And one that was not trained in fp16, whatever the checkpoint's own was."""
    path = tiny_checkpoints["sana-fp16"]
    checkpoint = open_checkpoint(path, from_scratch={"num_layers": 3})
    assert open_checkpoint(path).info.should_saturate
    assert not checkpoint.info.should_saturate
    assert len(checkpoint.denoiser.load_transformer(torch.float32).transformer_blocks) == 3
