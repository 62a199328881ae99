"""LTX-2's loss, recomputed directly from Diffusers' and Transformers' modules, without any of our code.

The transformer's forward pass is written out as Lightricks' model has it.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from family_cases.subject import CPU, pixels_of
from ltx2_cases import CAPTIONS, FPS, batch_of, for_recipe
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dit_lora.config.data import VideoShape
from dit_lora.numerics.streams import RandomStreams

SHAPE = VideoShape(17, 64, 96)


class Modality(NamedTuple):
    latents: torch.Tensor  # (B, S, C)
    text: torch.Tensor  # (B, T, D)
    timesteps: torch.Tensor  # (B,), or (B, S) where tokens differ
    sigma: torch.Tensor  # (B,), the noise level times 1000


def velocities_by_vendor(
    model: Any,
    video: Modality,
    sound: Modality,
    mask: torch.Tensor,
    grid: torch.Size,
    attend_to_each_other: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of Lightricks' model on Diffusers' blocks (ltx-core, transformer_args.py, model.py)."""
    rows, dtype, config = len(mask), video.latents.dtype, model.config
    gate_factor = config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier

    def embedded(module: Any, timesteps: torch.Tensor) -> list[torch.Tensor]:
        pair = module(timesteps.flatten(), batch_size=rows, hidden_dtype=dtype)
        return [tensor.view(rows, -1, tensor.shape[-1]) for tensor in pair]

    def rotary(coords: torch.Tensor, prefix: str) -> tuple[Any, Any]:
        self_rope, cross = (
            getattr(model, f"{prefix}rope"),
            getattr(model, f"cross_attn_{prefix}rope"),
        )
        return self_rope(coords, device=CPU), cross(coords[:, 0:1], device=CPU)

    video_rotary, video_cross_rotary = rotary(model.rope.prepare_video_coords(rows, *grid, CPU, fps=FPS), "")
    sound_rotary, sound_cross_rotary = rotary(
        model.audio_rope.prepare_audio_coords(rows, sound.latents.shape[1], CPU), "audio_"
    )
    text, sound_text = video.text, sound.text
    if config.use_prompt_embeddings:
        text, sound_text = (
            model.caption_projection(text),
            model.audio_caption_projection(sound_text),
        )
    text_modulation: dict[str, torch.Tensor] = {}
    if model.prompt_modulation:
        text_modulation["temb_prompt"] = embedded(model.prompt_adaln, video.sigma)[0]
        text_modulation["temb_prompt_audio"] = embedded(model.audio_prompt_adaln, sound.sigma)[0]
    temb, video_time = embedded(model.time_embed, video.timesteps)
    temb_sound, sound_time = embedded(model.audio_time_embed, sound.timesteps)
    # Scale and shift by the modality's own timesteps, the gate by the other one's noise level.
    video_cross = embedded(model.av_cross_attn_video_scale_shift, video.timesteps)[0]
    sound_cross = embedded(model.av_cross_attn_audio_scale_shift, sound.timesteps)[0]
    video_gate = embedded(model.av_cross_attn_video_a2v_gate, sound.sigma * gate_factor)[0]
    sound_gate = embedded(model.av_cross_attn_audio_v2a_gate, video.sigma * gate_factor)[0]
    x, y = model.proj_in(video.latents), model.audio_proj_in(sound.latents)
    bias = ((1 - mask.to(dtype)) * -10000.0).unsqueeze(1)
    for block in model.transformer_blocks:
        x, y = block(
            x, y, text, sound_text, temb, temb_sound, video_cross, sound_cross, video_gate, sound_gate,
            **text_modulation, video_rotary_emb=video_rotary, audio_rotary_emb=sound_rotary,
            ca_video_rotary_emb=video_cross_rotary, ca_audio_rotary_emb=sound_cross_rotary,
            encoder_attention_mask=bias, audio_encoder_attention_mask=bias,
            use_a2v_cross_attention=attend_to_each_other, use_v2a_cross_attention=attend_to_each_other,
        )  # fmt: skip

    def output(prefix: str, tokens: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        table = getattr(model, f"{prefix}scale_shift_table")
        shift, scale = (table[None, None] + time[:, :, None]).unbind(2)
        normed = getattr(model, f"{prefix}norm_out")(tokens) * (1 + scale) + shift
        projected: torch.Tensor = getattr(model, f"{prefix}proj_out")(normed)
        return projected

    return output("", x, video_time), output("audio_", y, sound_time)


@torch.no_grad()
def losses_by_diffusers(
    path: Path,
    kind: str,
    pixels: torch.Tensor,  # uint8 (B, F, 3, H, W)
    drawn: dict[str, torch.Tensor],
    sound: torch.Tensor | None,  # (B, L, W), normalised
) -> torch.Tensor:
    """The mean squared error of each sample's velocity; with sound, that of its sound added."""
    vae = AutoencoderKLLTX2Video.from_pretrained(path, subfolder="vae")
    transformer: Any = LTX2VideoTransformer3DModel.from_pretrained(path, subfolder="transformer")
    connectors = LTX2TextConnectors.from_pretrained(path, subfolder="connectors")
    gemma = AutoModelForImageTextToText.from_pretrained(path / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer", padding_side="left")
    tokens = tokenizer(
        [caption.strip() for caption in CAPTIONS],
        padding="max_length",
        max_length=1024,
        truncation=True,
        return_tensors="pt",
    )
    states = gemma(**tokens, output_hidden_states=True).hidden_states
    text, of_sound, mask = connectors(torch.stack(states, dim=-1), tokens.attention_mask)
    mean, std = (t[:, None, None, None] for t in (vae.latents_mean, vae.latents_std))
    clean = (vae.encode(2 * (pixels.transpose(1, 2) / 255) - 1).latent_dist.mean - mean) / std
    size, sigma = clean.shape, drawn["timestep"]
    clean = clean.flatten(2).mT
    noisy = clean + sigma[:, None, None] * (drawn["noise"] - clean)
    timestep = (1000 * sigma)[:, None].repeat(1, noisy.shape[1])
    frame = size[3] * size[4]
    if kind == "i2v":
        crf = 18 if gemma.config.model_type == "gemma4_unified" else 33
        first_frames = [picture.permute(1, 2, 0).numpy() for picture in pixels[:, 0]]
        sent = torch.tensor(np.stack([apply_image_conditioning_crf(picture, crf) for picture in first_frames]))
        pictures = 2 * (sent.permute(0, 3, 1, 2)[:, :, None] / 255) - 1
        latents = (vae.encode(pictures).latent_dist.mean - mean) / std
        noisy[:, :frame], timestep[:, :frame] = latents.flatten(2).mT, 0
    level, noisy_sound = sigma, torch.zeros(len(clean), 1, 16)
    if sound is not None:
        level = drawn["audio_timestep"]
        noisy_sound = sound + level[:, None, None] * (drawn["audio_noise"] - sound)
    video, audio = velocities_by_vendor(
        transformer,
        video=Modality(noisy, text, timestep, 1000 * sigma),
        sound=Modality(noisy_sound, of_sound, 1000 * level, 1000 * level),
        mask=mask,
        grid=size[2:],
        attend_to_each_other=sound is not None,
    )
    errors = (video - (drawn["noise"] - clean)).square()
    losses = errors[:, frame if kind == "i2v" else 0 :].flatten(1).mean(1)
    if sound is not None:
        losses = losses + (audio - (drawn["audio_noise"] - sound)).square().flatten(1).mean(1)
    return losses


@pytest.mark.parametrize("with_sound", [False, True])
@pytest.mark.parametrize(("variant", "kind"), [("ltx-2", "t2v"), ("ltx-2.3", "i2v"), ("ltx-2.5", "i2v")])
def test_our_loss_is_that_of_diffusers_modules(
    tiny_checkpoints: dict[str, Path], variant: str, kind: str, with_sound: bool
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint = for_recipe(path, model={"task": kind}, data={"sound": with_sound})
    generator = torch.Generator().manual_seed(7)
    pixels = torch.stack([pixels_of(SHAPE, generator) for _ in CAPTIONS])
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    rows = [
        encode_video(clip) | {name: t[0] for name, t in encode_text([caption]).items()}
        for clip, caption in zip(pixels, CAPTIONS, strict=True)
    ]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    sound = torch.randn(len(CAPTIONS), 11, 16, generator=generator) if with_sound else None
    if sound is not None:
        batch["audio_latent_mean"] = sound
    streams = RandomStreams(3, [1, 2, 3])
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    with torch.no_grad():
        ours = checkpoint.denoiser.losses(checkpoint.denoiser.load_transformer(torch.float32), batch, streams).losses
    theirs = losses_by_diffusers(path, kind, pixels, random_inputs, sound)
    assert len(set(random_inputs["timestep"].tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("variant", "kind"), [("ltx-2", "t2v"), ("ltx-2.3", "i2v"), ("ltx-2.5", "i2v")])
def test_velocities_and_gradients_are_the_vendors_at_unequal_noise_levels(
    tiny_checkpoints: dict[str, Path], variant: str, kind: str
) -> None:
    """In fp64, for every weight; image-to-video has timesteps of 0 at the tokens of the first frame."""
    path = tiny_checkpoints[variant]
    checkpoint = for_recipe(path, model={"task": kind}, data={"sound": True, "image_dropout": 0.0})
    model = checkpoint.denoiser.load_transformer(torch.float32).double().requires_grad_(True)
    batch = batch_of(checkpoint, sound=True)
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    rows, _, *grid = batch["latent_mean"].shape
    generator = torch.Generator().manual_seed(11)
    noisy, noisy_sound = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((rows, math.prod(grid), 8), batch["audio_latent_mean"].shape)
    )
    sigma, sound_sigma = torch.tensor([950.0, 400.0, 30.0]), torch.tensor([120.0, 700.0, 990.0])
    batch |= {"audio_noisy": noisy_sound, "audio_timestep": sound_sigma}
    random_inputs = RandomStreams(3, [1, 2, 3]).draw_random_tensors(
        checkpoint.denoiser.get_random_input_samplers(batch), CPU
    )
    timesteps = checkpoint.denoiser.conditioning.token_timesteps(sigma, batch, random_inputs)
    assert (timesteps.ndim == 2) == (kind == "i2v")
    ours = checkpoint.denoiser.predict_velocities(model, noisy, sigma, batch, random_inputs)
    theirs = velocities_by_vendor(
        model,
        video=Modality(noisy, batch["prompt_embeds"], timesteps, sigma),
        sound=Modality(noisy_sound, batch["audio_prompt_embeds"], sound_sigma, sound_sigma),
        mask=batch["prompt_attention_mask"],
        grid=torch.Size(grid),
        attend_to_each_other=True,
    )
    cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in theirs]
    # Only the keyframes of Diffusers' DFR pipelines use LTX-2.5's embedding of them.
    weights = {n: weight for n, weight in model.named_parameters() if n != "keyframes_abs_pos_embedding"}
    our_gradients, their_gradients = (
        torch.autograd.grad(outputs, list(weights.values()), cotangents) for outputs in (ours, theirs)
    )
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    assert any("av_cross_attn_audio_scale_shift" in name for name in weights)
    for name, actual, expected in zip(weights, our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9, msg=name)
    assert not any(part._forward_pre_hooks for part in model.modules())
