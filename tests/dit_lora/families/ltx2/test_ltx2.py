"""LTX-2's own facts: text behind the connectors, video without sound, guidance, noise levels, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from exported import assert_same, deltas, trained
from family_cases.ltx2 import NATIVE
from family_cases.subject import CPU
from ltx2_cases import CAPTIONS, FPS, batch_of, changed, for_recipe, opened
from safetensors.torch import load_file, save_file

from dit_lora.config.data import VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families.base import Sampling
from dit_lora.families.ltx2.layers import SOUND_ATTENTIONS
from dit_lora.numerics.streams import RandomStreams

VARIANTS = pytest.mark.parametrize("variant", [pytest.param("ltx-2", marks=pytest.mark.thorough), "ltx-2.3"])


class Recorder(torch.nn.Module):
    """Stands in for a transformer: keeps its arguments and calls it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, list[dict[str, Any]]()

    def forward(self, **given: Any) -> Any:
        self.calls.append(given)
        return self.model(**given)


@VARIANTS
@torch.no_grad()
def test_video_alone_depends_on_no_bit_of_sound(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """One token of zeros, or many of other values at another time with another text: the same video."""
    checkpoint = opened(tiny_checkpoints[variant])
    model = Recorder(checkpoint.denoiser.load_transformer(torch.float32))
    batch = batch_of(checkpoint)
    noisy = torch.randn(3, 3 * 2 * 3, 8, generator=torch.Generator().manual_seed(1))
    video = checkpoint.denoiser.predict(model, noisy, torch.tensor([40.0, 500.0, 999.0]), batch)
    (kwargs,) = model.calls
    assert kwargs["audio_hidden_states"].shape == (3, 1, 16)
    changed_sound = {
        "audio_hidden_states": torch.randn(3, 5, 16),
        "audio_encoder_hidden_states": torch.randn(3, 9, 16),
        "audio_timestep": torch.tensor([7.0, 8.0, 9.0]),
        "audio_num_frames": 5,
    }
    assert torch.equal(model.model(**{**kwargs, **changed_sound})[0], video)
    joint = model.model(**{**kwargs, **changed_sound, "isolate_modalities": False})[0]
    assert not torch.allclose(joint, video, atol=1e-3)


@torch.no_grad()
def test_text_is_cut_to_the_batchs_longest_where_it_is_masked(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """The connectors return a mask of ones (Diffusers 0.42.1): all tokens are seen, padding and registers too."""
    checkpoint = opened(tiny_checkpoints["ltx-2"])
    model, batch = Recorder(checkpoint.denoiser.load_transformer(torch.float32)), batch_of(checkpoint)
    noisy = torch.randn(3, 3 * 2 * 3, 8, generator=torch.Generator().manual_seed(1))
    timesteps, lengths = torch.tensor([40.0, 500.0, 999.0]), [5, 30, 17]
    checkpoint.denoiser.predict(model, noisy, timesteps, batch)
    for row, length in zip(batch["prompt_attention_mask"], lengths, strict=True):
        row[length:] = 0
    prediction = checkpoint.denoiser.predict(model, noisy, timesteps, batch)
    free, kwargs = model.calls
    assert free["encoder_attention_mask"] is None
    assert free["encoder_hidden_states"].shape[1] == 1024
    assert kwargs["encoder_hidden_states"].shape[1] == 30
    assert kwargs["encoder_attention_mask"].sum(1).tolist() == lengths
    full_text = {
        "encoder_hidden_states": batch["prompt_embeds"],
        "encoder_attention_mask": batch["prompt_attention_mask"],
    }
    torch.testing.assert_close(model.model(**{**kwargs, **full_text})[0], prediction, rtol=1e-5, atol=1e-6)


def test_cached_text_depends_on_the_connectors(tiny_checkpoints: dict[str, Path]) -> None:
    first_checkpoint, second = (opened(tiny_checkpoints[name]) for name in ("ltx-2", "ltx-2.3"))
    for checkpoint in (first_checkpoint, second):
        folder = checkpoint.path / "connectors"
        assert checkpoint.encoders.text_cache_key()["connectors"] == folder
        (encoded,) = ({n: t[0] for n, t in e.items()} for e in [_encoded(checkpoint)])
        spec = checkpoint.encoders.text_spec(torch.float32)
        assert {n: (t.shape, t.dtype) for n, t in encoded.items()} == spec
        # Registers stand in the place of pads: nothing is masked.
        assert encoded["prompt_attention_mask"].all()


def _encoded(checkpoint: Any) -> dict[str, torch.Tensor]:
    return checkpoint.encoders.load_text_encoder(torch.float32, CPU)([CAPTIONS[1]])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@VARIANTS
def test_samples_of_a_prompts_text_and_of_its_tensors_are_alike(
    tiny_checkpoints: dict[str, Path], variant: str, guidance: float
) -> None:
    """Behind the connectors, without text encoder and connectors; and the calls of one step."""
    checkpoint = opened(tiny_checkpoints[variant])
    sampling = Sampling(NATIVE, 2, guidance, seed=3, fps=FPS)
    full_pipeline, textless_pipeline = (
        checkpoint.sampler.pipeline(torch.float32, text=text) for text in (True, False)
    )
    assert textless_pipeline.text_encoder is None
    assert textless_pipeline.connectors is None
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    tensors, empty = encode([CAPTIONS[1]]), encode([""])
    samples, calls = [], []
    for pipeline, conditions in (
        (full_pipeline, checkpoint.sampler.prompt_kwargs(CAPTIONS[1])),
        (textless_pipeline, checkpoint.sampler.prompt_kwargs(tensors, empty)),
    ):
        pipeline.set_progress_bar_config(disable=True)
        recorded_calls: list[Any] = []
        pipeline.transformer.register_forward_pre_hook(
            lambda _model, _args, kwargs, recorded_kwargs=recorded_calls: recorded_kwargs.append(kwargs),
            with_kwargs=True,
        )
        samples.append(checkpoint.sampler.generate(pipeline, conditions, sampling))
        calls.append(len(recorded_calls) / sampling.inference_steps)
        assert {call["fps"] for call in recorded_calls} == {FPS}
    assert torch.equal(*samples)
    assert textless_pipeline.connectors is None
    # With and without the prompt in one call; without sound; and of 2.3 with perturbed attention.
    expected = 1 if guidance == 1 else {"ltx-2": 2, "ltx-2.3": 3}[variant]
    assert calls == [expected, expected]


@pytest.mark.parametrize(
    ("tokens", "mu"),
    [
        (126, 0.6284505),  # sound of 121 frames at 24 a second
        (1024, 0.95),
        (2560, 1.5),
        (4096, 2.05),
        (6144, 2.7833333),  # every recipe
        (14080, 5.625),
        (32768, 12.3166667),
    ],
)
def test_noise_levels_are_those_of_the_vendors_sampler(
    tiny_checkpoints: dict[str, Path], tokens: int, mu: float
) -> None:
    """1e5 draws against ShiftedLogitNormalTimestepSampler (ltx-trainer, timestep_samplers.py) in fp64."""
    checkpoint = opened(tiny_checkpoints["ltx-2"])
    size = torch.Size([8, 1, 1, tokens])
    assert checkpoint.denoiser.compute_shift_mu(size) == pytest.approx(mu, rel=1e-6)
    levels = checkpoint.denoiser.objective.distribution
    assert (levels.density, levels.mean, levels.std) == ("stretched_logit_normal", 0.0, 1.0)
    gaussian = torch.randn(100_000, generator=torch.Generator().manual_seed(7))
    sigmas = checkpoint.denoiser.objective.compute_sigmas(gaussian, checkpoint.denoiser.compute_shift(size))
    rng = np.random.default_rng(1)
    # 1 % of correct samples of 100,000 and 200,000 draws are further apart than 0.0063.
    actual, expected = np.sort(sigmas.numpy()), np.sort(vendor_noise_levels(tokens, 200_000, rng))
    fraction = np.searchsorted(expected, actual) / len(expected)
    distance = np.abs(fraction - (np.arange(len(actual)) + 0.5) / len(actual)).max()
    assert distance < 0.007


def vendor_noise_levels(tokens: int, number: int, rng: np.random.Generator) -> np.ndarray:
    mu = 0.95 + (tokens - 1024) * (2.05 - 0.95) / (4096 - 1024)
    sigmoid = 1 / (1 + np.exp(-mu - rng.standard_normal(number)))
    high, low = (1 / (1 + np.exp(-mu - z)) for z in (3.0902, -2.5758))
    stretched = (sigmoid - low) / (high - low)
    stretched = np.where(stretched >= 1e-3, stretched, 2e-3 - stretched).clip(0, 1)
    uniform = (1 - 1e-3) * rng.random(number) + 1e-3
    return np.where(rng.random(number) > 0.1, stretched, uniform)


def test_noise_levels_reach_their_limit_at_any_number_of_tokens(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """From about 32,768 tokens on the density no longer changes; fp64 has no digits of a level at a mu of 90."""
    checkpoint = opened(tiny_checkpoints["ltx-2"])
    gaussian = torch.linspace(-3, 3, 25)
    at_limit, beyond_limit, far_beyond = (
        checkpoint.denoiser.objective.compute_sigmas(
            gaussian, checkpoint.denoiser.compute_shift(torch.Size([8, 1, 1, tokens]))
        )
        for tokens in (32_768, 65_536, 262_144)
    )
    assert (beyond_limit.diff() > 0).all()
    torch.testing.assert_close(at_limit, beyond_limit, rtol=0, atol=1e-3)
    torch.testing.assert_close(beyond_limit, far_beyond, rtol=0, atol=1e-6)


def test_positions_are_in_seconds(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["ltx-2.3"]
    assert opened(path).info.frame_rate == 24.0  # the pipeline's default
    assert for_recipe(path).info.frame_rate == FPS
    assert opened(path).copy_with_training_metadata({"video": {"fps": 12.5}}).info.frame_rate == 12.5
    image = for_recipe(path, data={"frames": 1, "fps": None})
    assert image.info.frame_rate == 24.0
    checkpoint = opened(path)
    model, batch = checkpoint.denoiser.load_transformer(torch.float32), batch_of(checkpoint)
    slow, fast = (
        checkpoint.copy_with_info(replace(checkpoint.info, fps=fps))
        .losses(model, batch, RandomStreams(0, [0, 1, 2]))
        .losses
        for fps in (8.0, 24.0)
    )
    assert not torch.equal(slow, fast)


def test_the_picture_is_left_out_of_a_share_of_samples(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["ltx-2.3"]
    checkpoint = for_recipe(path, model={"task": "i2v"}, data={"image_dropout": 0.5})
    assert checkpoint.info.model_index_changes() == {"_class_name": "LTX2ImageToVideoPipeline"}
    batch = batch_of(checkpoint)
    random_inputs = {"image_dropout": torch.tensor([True, False, True])}
    conditioning_mask = checkpoint.denoiser.conditioning.compute_conditioning_mask(batch, random_inputs)
    assert conditioning_mask.sum((1, 2)).tolist() == [6, 0, 6]
    token_timesteps = checkpoint.denoiser.conditioning.token_timesteps(
        torch.tensor([100.0, 200.0, 300.0]), batch, random_inputs
    )
    assert token_timesteps.shape == (3, 18)
    assert token_timesteps[:, :6].tolist() == [[0.0] * 6, [200.0] * 6, [0.0] * 6]
    assert token_timesteps[:, 6:].unique(dim=1).flatten().tolist() == [100.0, 200.0, 300.0]
    # The picture was compressed as a video's frame, and is not the clip's own first one.
    clean = checkpoint.denoiser.clean_latents(batch, random_inputs)
    packed = LTX2Pipeline._pack_latents(batch["latent_mean"])
    assert torch.equal(clean[1], packed[1])
    assert torch.equal(clean[:, 6:], packed[:, 6:])
    assert not torch.equal(clean[0, :6], packed[0, :6])
    rows = [torch.Generator().manual_seed(seed) for seed in range(2000)]
    assert 0.46 < checkpoint.denoiser.get_random_input_samplers(batch)["image_dropout"](rows).float().mean() < 0.54


OTHERS = {
    "conditions": ("", {"_class_name": "LTX2ConditionPipeline"}, "is a LTX2ConditionPipeline"),
    "channels": ("transformer", {"in_channels": 4}, "in_channels must be 8; got 4"),
    "sound": ("transformer", {"audio_in_channels": 4}, "audio_in_channels must be 16; got 4"),
    "patches": ("transformer", {"patch_size_t": 2}, "patch_size_t must be 1; got 2"),
    "rate": ("audio_vae", {"sample_rate": 8000}, "audio_sampling_rate must be 8000; got 16000"),
    "factors": ("transformer", {"vae_scale_factors": [4, 32, 32]}, "are not the VAE's, 8 and 32"),
    "text": ("connectors", {"per_modality_projections": True}, "use_prompt_embeddings True: one"),
    "scheduler": ("scheduler", {"time_shift_type": "linear"}, "knows exponential"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_refused_by_name(tiny_checkpoints: dict[str, Path], tmp_path: Path, what: str) -> None:
    component, values, message = OTHERS[what]
    path = changed(tiny_checkpoints["ltx-2"], tmp_path / "other", component, **values)
    with pytest.raises(DitLoraError, match=message):
        opened(path)


def test_parts_of_ltx_2_5_that_nothing_uses_may_be_missing(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    listed = {
        "duration_head": ["ltx2", "LTX2DurationHead"],
        "prompt_enhancer": ["transformers", "Gemma4ForConditionalGeneration"],
    }
    checkpoint = opened(changed(tiny_checkpoints["ltx-2.5"], tmp_path / "other", "", **listed))
    for pipeline in (
        checkpoint.encoders.load_text_pipeline(torch.float32, torch.device("cpu")),
        checkpoint.sampler.pipeline(torch.float32),
    ):
        assert (pipeline.duration_head, pipeline.prompt_enhancer) == (None, None)


@pytest.mark.parametrize(("variant", "crf"), [("ltx-2.3", 33), ("ltx-2.5", 18)])
def test_a_first_image_is_compressed_as_its_version_was_trained(
    tiny_checkpoints: dict[str, Path], variant: str, crf: int
) -> None:
    """Also in samples of cached prompts, whose pipeline has no text encoder to take the strength from."""
    checkpoint = for_recipe(tiny_checkpoints[variant], model={"task": "i2v"})
    assert checkpoint.sampler.shape_kwargs(VideoShape(9, 64, 96))["image_crf"] == crf
    assert f"CRF {crf}," in checkpoint.encoders.latent_cache_key()["image"]


def test_torn_weights_of_any_part_are_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoints["ltx-2"], tmp_path / "torn")
    for part in ("connectors", "audio_vae", "vocoder"):
        (tmp_path / "torn" / part / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(DitLoraError) as caught:
        opened(tmp_path / "torn")
    for part in ("connectors", "audio_vae", "vocoder"):
        assert f"{part}: no .safetensors file" in str(caught.value)


def test_a_distilled_checkpoint_is_sampled_from_and_not_trained(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    values = {"use_dynamic_shifting": False, "shift_terminal": None}
    path = changed(tiny_checkpoints["ltx-2.3"], tmp_path / "fast", "scheduler", **values)
    assert opened(path).info.is_distilled
    with pytest.raises(DitLoraError, match=r"fast is step-distilled .* validation.model"):
        for_recipe(path)
    assert for_recipe(path, train={"target": "guided"}).info.is_distilled


WITHOUT_SOUND = {
    "all": ({"lora": {"targets": ["to_q"]}}, "lora.targets: to_q adapts layers of sound too"),
    "gates": ({"lora": {"targets": ["attn1.to_q", "to_gate_logits"]}}, ": to_gate_logits adapts"),
    "full": (
        {
            "train": {"steps": 1, "mode": "full"},
            "optim": {"groups": {"backbone": {"lr": 1e-4}, "connector": {"lr": 1e-5}}},
        },
        "train.mode: full",
    ),
    "connector": (
        {"optim": {"groups": {"adapter": {"lr": 1e-4}, "connector": {"lr": 1e-5}}}},
        "optim.groups.connector",
    ),
}


@pytest.mark.parametrize("what", WITHOUT_SOUND)
def test_what_would_get_no_gradient_without_sound_is_refused(tiny_checkpoints: dict[str, Path], what: str) -> None:
    sections, message = WITHOUT_SOUND[what]
    with pytest.raises(DitLoraError, match=message):
        for_recipe(tiny_checkpoints["ltx-2.3"], **sections)
    with_sound = for_recipe(tiny_checkpoints["ltx-2.3"], **sections, data={"sound": True})
    assert with_sound.info.has_sound
    values = {"lora": {"targets": ["attn1.to_q", "ff.net.2", "attn2.to_gate_logits"]}}
    assert not for_recipe(tiny_checkpoints["ltx-2.3"], **values).info.has_sound


def test_other_families_have_no_sound(tiny_checkpoints: dict[str, Path]) -> None:
    wan = {"family": "wan", "path": str(tiny_checkpoints["wan-2.1-t2v"])}
    with pytest.raises(DitLoraError, match=r"data.sound: family wan does not use this"):
        for_recipe(tiny_checkpoints["wan-2.1-t2v"], model=wan, data={"sound": True})


def test_stock_diffusers_reads_what_comfyui_does(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Every kind of layer, in the names of the published checkpoint, without alpha, which its loader refuses."""
    outer_layers = ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out", "linear", "linear_1")
    targets = (*("to_q", "to_out.0", "to_gate_logits", "net.0.proj", "net.2"), *outer_layers)
    adapter = trained("ltx2", tiny_checkpoints["ltx-2.3"], tmp_path / "run", targets=targets)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    assert all(name.startswith("diffusion_model.") for name in tensors)
    assert not any(name.endswith(".alpha") for name in tensors)
    assert "diffusion_model.av_ca_a2v_gate_adaln_single.linear.lora_A.weight" in tensors
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    expected = deltas(adapter.model)
    assert len(expected) == 2 * (6 * 3 + 4) + 4 + 8 * 2
    assert_same(deltas(pipeline.transformer), expected)


def test_the_names_of_sounds_layers_are_all(tiny_checkpoints: dict[str, Path]) -> None:
    model = opened(tiny_checkpoints["ltx-2"]).denoiser.load_transformer(torch.float32)
    attentions = [n for n, m in model.transformer_blocks[0].named_children() if hasattr(m, "to_q")]
    assert set(attentions) == {"attn1", "attn2", *SOUND_ATTENTIONS}


def test_one_step_is_refused_where_the_scheduler_makes_nan_of_it(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["ltx-2.3"]
    sampling = Sampling(NATIVE, 1, 1.0, seed=0)
    with pytest.raises(DitLoraError, match="inference steps must be 2 or more"):
        opened(path).sampler.generate(None, {}, sampling)
    settings = {"prompts": ["a"], "inference_steps": 1}
    with pytest.raises(DitLoraError, match=r"validation\.inference_steps must be 2 or more"):
        for_recipe(path, validation=settings)
    for_recipe(path, validation={**settings, "inference_steps": 2})
