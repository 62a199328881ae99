"""Trains a small CogVideoX VAE on rendered clips: 4 x 4 pixels and up to 4 frames to 8 channels."""

import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX
from tqdm import tqdm

from dit_lora.data.synthetic.scenes import SHAPES, draw_scene, render_scene

LATENT_CHANNELS = 8
_SIDE = 64
_CROP = 32
# Weights of the loss's parts beside the mean absolute error of pixels.
_EDGES, _KL = 0.3, 3e-4
# How much more a fully saturated pixel counts than a grey one: shapes cover few pixels.
_CHROMA = 5.0
# Share of the steps on crops; the last ones see whole pictures, whose normalisation differs.
_CROPPED = 0.9


def train_vae(folder: Path, steps: int, clips: int, seed: int = 0) -> AutoencoderKLCogVideoX:
    """Train a VAE and save it in `folder`, in fp32 and with the scaling factor that gives latents a deviation of 1."""
    generator = torch.Generator().manual_seed(seed)
    videos = render_clips(clips, generator)
    torch.manual_seed(seed)
    vae = build_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=0)
    progress = tqdm(range(steps), desc="VAE", mininterval=10)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (1 - step / steps) + 1e-5
        is_cropped = step < _CROPPED * steps
        batch = draw_batch(videos, 8 if is_cropped else 3, _CROP if is_cropped else _SIDE, generator)
        loss = compute_loss(vae, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    deviation = measure_deviation(vae, videos[:64])
    vae.register_to_config(scaling_factor=1 / deviation)
    vae.save_pretrained(folder)
    return vae


def build_vae() -> AutoencoderKLCogVideoX:
    """Build an untrained VAE of 0.64 million parameters."""
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(16, 32, 32),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
        sample_height=_SIDE,
        sample_width=_SIDE,
        scaling_factor=1.0,
    )


def render_clips(count: int, generator: torch.Generator) -> torch.Tensor:
    """Clips of known scenes, uint8 (count, 9, 64, 64, 3)."""
    scenes = [draw_scene(generator, SHAPES[:-1]) for _ in range(count)]
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
        top, left = corner.clamp(0, video.shape[1] - size).tolist()
        crops.append(video[:, top : top + size, left : left + size])
    return torch.stack(crops).permute(0, 4, 1, 2, 3) / 127.5 - 1


def compute_loss(vae: AutoencoderKLCogVideoX, pixels: torch.Tensor) -> torch.Tensor:
    """Reconstruction, edges and KL of clips (B, 3, F, H, W)."""
    posterior = vae.encode(pixels).latent_dist
    error = vae.decode(posterior.sample()).sample - pixels
    weights = 1 + _CHROMA * (pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True))
    # Differences between neighbours in time, in y and in x.
    edges = sum(error.diff(dim=dim).abs().mean() for dim in (2, 3, 4))
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return (weights * (error.abs() + error.square())).mean() + _EDGES * edges + _KL * kl


@torch.no_grad()
def measure_deviation(vae: AutoencoderKLCogVideoX, videos: torch.Tensor) -> float:
    """Standard deviation of the latents' means."""
    pixels = videos.permute(0, 4, 1, 2, 3) / 127.5 - 1
    return float(torch.cat([vae.encode(chunk).latent_dist.mean for chunk in pixels.split(8)]).std())
