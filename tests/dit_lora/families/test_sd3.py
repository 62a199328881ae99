"""Stable Diffusion 3: text, layers with an adapter, shifts, guidance, and 3.0's attention without norms."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from family_cases.subject import (
    CPU,
    EVERY,
    adapted,
    changed,
    encoded_batch,
    open_subject,
    two_samples,
)
from peft.tuners.lora import LoraLayer

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomStreams

FAMILY = get_family("sd3")
CAPTIONS = ("A Red cat on\na mat", "", "a caption that is far longer than a CLIP reads, " * 8)
every_variant = pytest.mark.parametrize("variant", FAMILY.tiny_variants)


def open_checkpoint(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="sd3", path=str(path)))


@every_variant
def test_captions_are_encoded_as_the_pipeline_does_whatever_their_neighbours(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint, pipeline = open_checkpoint(path), StableDiffusion3Pipeline.from_pretrained(path)
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(CAPTIONS)
    spec = checkpoint.encoders.text_spec(torch.float32)
    assert {n: (t.shape[1:], t.dtype) for n, t in encoded.items()} == spec
    for row, caption in enumerate(CAPTIONS):
        with torch.no_grad():
            embeds, _, pooled, _ = pipeline.encode_prompt(caption, None, None)
        assert torch.equal(encoded["prompt_embeds"][row], embeds[0])
        assert torch.equal(encoded["pooled_prompt_embeds"][row], pooled[0])
    half = checkpoint.encoders.load_text_encoder(torch.bfloat16, CPU)(CAPTIONS)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    folders = {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert folders | {"tokenizer", "tokenizer_2", "tokenizer_3", "tokens"} == set(checkpoint.encoders.text_cache_key())


@every_variant
def test_a_batch_of_unequal_captions_is_one_call_of_the_pipeline_in_bf16_too(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """The timestep stays fp32, where FLUX's is rounded."""
    checkpoint, dtype = open_checkpoint(tiny_checkpoints[variant]), torch.bfloat16
    text = checkpoint.encoders.load_text_encoder(dtype, CPU)(CAPTIONS)
    pipeline = checkpoint.sampler.pipeline(dtype, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    pipeline(
        **checkpoint.sampler.prompt_kwargs(text),
        **checkpoint.sampler.shape_kwargs(VideoShape(1, 48, 80)),
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(1),
    )
    transformer = checkpoint.denoiser.load_transformer(dtype).eval()
    assert len(calls) == 3
    for call, expected in calls:
        noisy, timesteps = call["hidden_states"], call["timestep"]
        assert timesteps.dtype is torch.float32
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, noisy.float(), timesteps, text)
        assert prediction.dtype is expected.dtype is dtype
        assert torch.equal(prediction, expected)
    assert len({tuple(row.flatten().tolist()) for row in expected}) == 3


@every_variant
def test_every_layer_of_attention_that_is_read_has_an_adapter(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """All but the queries of the last block's text: an adapter on them has no gradient, ever."""
    subject = open_subject(EVERY[variant], tiny_checkpoints[variant])
    model = adapted(subject)
    targets = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    attention = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | LoraLayer)
        and (".attn." in name or ".attn2." in name)
        and "base_layer" not in name
        and ".lora_" not in name
    }
    unread = "transformer_blocks.1.attn.add_q_proj"
    assert attention - targets == {unread}
    assert targets < attention
    assert any("attn2" in name for name in targets) == (variant == "sd3.5-medium")
    weight = model.get_submodule(unread).weight.requires_grad_()
    losses = subject.checkpoint.denoiser.losses(model, encoded_batch(subject), RandomStreams(0, [0, 1, 2])).losses
    (gradient,) = torch.autograd.grad(losses.sum(), [weight])
    assert not gradient.any()


def test_a_scheduler_that_shifts_by_size_is_trained_with_the_pipelines_shift(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, size = tiny_checkpoints["sd3.5-large"], torch.Size([4, 6, 10])
    with pytest.raises(DitLoraError, match="does not shift by size; give a number"):
        open_checkpoint(tiny).denoiser.compute_shift_mu(size)
    assert open_checkpoint(tiny).denoiser.compute_shift(size) == 3
    file = "scheduler/scheduler_config.json"
    path = changed(tiny, tmp_path / "m", file, use_dynamic_shifting=True, base_shift=0.7)
    checkpoint, pipeline = open_checkpoint(path), StableDiffusion3Pipeline.from_pretrained(path)
    recorded: list[float] = []

    class StopHereError(Exception):
        pass

    def set_timesteps(steps: int, device: Any, mu: float) -> None:
        recorded.append(mu)
        raise StopHereError

    monkeypatch.setattr(pipeline.scheduler, "set_timesteps", set_timesteps)
    with pytest.raises(StopHereError):
        pipeline("a cat", **checkpoint.sampler.shape_kwargs(VideoShape(1, 48, 80)))
    assert recorded == [checkpoint.denoiser.compute_shift_mu(size)]
    # The line through (256, 0.7) and (4096, 1.15), at 15 tokens.
    assert checkpoint.denoiser.compute_shift_mu(size) == pytest.approx(0.7 - 241 * 0.45 / 3840)
    assert checkpoint.denoiser.compute_shift(size) == math.exp(recorded[0])


@every_variant
def test_guidance_from_cached_text_equals_guidance_from_words(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    texts, tensors, batches = two_samples(checkpoint, VideoShape(1, 32, 64))
    assert batches == [checkpoint.sampler.guidance_batch_size] * 2
    assert texts.shape == (1, 32, 64, 3)
    assert texts.float().std() > 1
    assert torch.equal(texts, tensors)


def test_3_0_medium_without_norms_and_second_attention_is_of_the_same_code(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its config is older than both options."""
    path = Path(shutil.copytree(tiny_checkpoints["sd3.5-large"], tmp_path / "sd3-medium"))
    file = path / "transformer" / "config.json"
    config = json.loads(file.read_text())
    del config["qk_norm"], config["dual_attention_layers"]
    torch.manual_seed(4)
    older: Any = SD3Transformer2DModel.from_config(config)
    shutil.rmtree(file.parent)
    older.save_pretrained(file.parent)
    file.write_text(json.dumps(config))
    subject = open_subject(EVERY["sd3.5-large"], path)
    model = adapted(subject)
    assert not any("norm_q" in name for name, _ in model.named_modules())
    batch = encoded_batch(subject)
    losses = subject.checkpoint.denoiser.losses(model, batch, RandomStreams(0, [0, 1, 2])).losses
    losses.sum().backward()
    assert losses.isfinite().all()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
