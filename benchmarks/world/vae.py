"""Trains a small CogVideoX VAE on rendered clips: 2 x 2 pixels and up to 2 frames to 4 channels."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX
from torch import nn
from tqdm import tqdm

from dit_lora.data.synthetic.scenes import KNOWN_SHAPES, draw_scene, render_scene

LATENT_CHANNELS = 4
_SIDE = 64
_CROP = 32
# How much more a fully saturated pixel counts than a grey one: shapes cover few pixels.
_CHROMA = 5.0
_KL = 3e-4
# Deviation of the noise on latents while the decoder trains alone: those that a denoiser makes are not exact.
_LATENT_NOISE = 0.03


def train_vae(folder: Path, steps: int, decoder_steps: int, clips: int, seed: int = 0) -> AutoencoderKLCogVideoX:
    """Train a VAE, then only the decoder, and save both in `folder` in fp32.

    The scaling factor in the config gives latents a standard deviation of 1.
    """
    generator = torch.Generator().manual_seed(seed)
    videos = render_clips(clips, generator)
    torch.manual_seed(seed)
    vae = build_vae()
    _train(vae, vae, videos, steps, 2e-3, generator)
    vae.register_to_config(scaling_factor=1 / measure_deviation(vae, videos[:64]))
    vae.encoder.requires_grad_(False)
    _train(vae, vae.decoder, videos, decoder_steps, 1.2e-3, generator)
    vae.save_pretrained(folder)
    return vae


def _train(
    vae: AutoencoderKLCogVideoX,
    trained: nn.Module,
    videos: torch.Tensor,
    steps: int,
    lr: float,
    generator: torch.Generator,
) -> None:
    optimizer = torch.optim.AdamW(trained.parameters(), betas=(0.9, 0.99), weight_decay=0)
    progress = tqdm(range(steps), desc="VAE" if trained is vae else "decoder", mininterval=10)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50) * (1 - step / steps) + 1e-5
        # Crops first; then whole pictures, which group normalisation treats differently.
        is_cropped = trained is vae and step < 0.85 * steps
        pixels = draw_batch(videos, 8 if is_cropped else 3, _CROP if is_cropped else _SIDE, generator)
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.sample()
        if trained is vae:
            loss = _KL * 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        else:
            latents, loss = latents + _LATENT_NOISE * torch.randn_like(latents), torch.zeros(())
        loss = loss + compute_reconstruction_loss(vae.decode(latents).sample, pixels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def build_vae() -> AutoencoderKLCogVideoX:
    """Build an untrained VAE of 0.45 million parameters."""
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(16, 32),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=2,
        sample_height=_SIDE,
        sample_width=_SIDE,
        scaling_factor=1.0,
    )


def render_clips(count: int, generator: torch.Generator) -> torch.Tensor:
    """Clips of scenes that the base may know, uint8 (count, 9, 64, 64, 3)."""
    scenes = [draw_scene(generator, KNOWN_SHAPES) for _ in range(count)]
    return torch.stack([render_scene(scene, generator) for scene in tqdm(scenes, desc="clips", mininterval=10)])


def draw_batch(videos: torch.Tensor, count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Crops of random clips around a pixel of the shape: fp32 (count, 3, F, size, size) in -1 to 1."""
    crops = []
    for index in torch.randint(len(videos), (count,), generator=generator).tolist():
        video = videos[index].int()
        frame = video[int(torch.randint(len(video), (), generator=generator))]
        pixels = (frame.amax(-1) - frame.amin(-1) > 50).nonzero()
        pixel = pixels[int(torch.randint(len(pixels), (), generator=generator))]
        corner = pixel - size // 2 + torch.randint(-10, 11, (2,), generator=generator)
        row, column = corner.clamp(0, video.shape[1] - size).tolist()
        crops.append(video[:, row : row + size, column : column + size])
    return torch.stack(crops).permute(0, 4, 1, 2, 3) / 127.5 - 1


def compute_reconstruction_loss(decoded: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Errors of clips (B, 3, F, H, W), in which saturated pixels count more, and errors of edges."""
    error = decoded - pixels
    weights = 1 + _CHROMA * (pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True))
    # Differences between neighbours in time, in y and in x.
    edges = torch.stack([error.diff(dim=dim).abs().mean() for dim in (2, 3, 4)]).sum()
    return (weights * (error.abs() + error.square())).mean() + 0.4 * edges


@torch.no_grad()
def measure_deviation(vae: AutoencoderKLCogVideoX, videos: torch.Tensor) -> float:
    """Standard deviation of the latents' means."""
    pixels = videos.permute(0, 4, 1, 2, 3) / 127.5 - 1
    return float(torch.cat([vae.encode(chunk).latent_dist.mean for chunk in pixels.split(8)]).std())
