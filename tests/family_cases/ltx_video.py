"""LTX-Video."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke

NATIVE = VideoShape(17, 64, 96)


def unpacked(pipeline: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, F, H, W) as the VAE decodes them; LTXPipeline.__call__ ends so."""
    grid = ((NATIVE.frames - 1) // 8 + 1, NATIVE.height // 32, NATIVE.width // 32)
    vae = pipeline.vae
    return pipeline._denormalize_latents(
        pipeline._unpack_latents(tokens, *grid),
        vae.latents_mean,
        vae.latents_std,
        vae.config.scaling_factor,
    )


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """0.9.1's decoder is told a timestep and draws noise of torch's own generator."""
    timestep = torch.tensor([0.05]) if pipeline.vae.config.timestep_conditioning else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pipeline.vae.decode(mean, timestep).sample


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    return vae_decode(pipeline, unpacked(pipeline, clean))


def decode_rest(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Without the first frame, which is drawn from the picture's posterior."""
    return vae_decode(pipeline, unpacked(pipeline, clean)[:, :, 1:])


def vae_decode_rest(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return vae_decode(pipeline, mean[:, :, 1:])


def of_the_sample(call: Call) -> torch.Tensor:
    """The one timestep of a sample, which image-to-video tells every token; 0 at those of the image."""
    return call["timestep"].amax(1)


def as_sampled(batch: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The pipeline draws the image's latent from its posterior, before the noise and by the same generator."""
    mean, logvar = batch["image_latent_mean"], batch["image_latent_logvar"]
    noise = torch.randn(mean[:1].shape, generator=torch.Generator().manual_seed(seed))
    return {**batch, "image_latent_mean": mean + torch.exp(0.5 * logvar) * noise}


REFUSED = (
    (VideoShape(9, 48, 96), "height must be a multiple of 32; got 48, nearest 32 and 64"),
    (VideoShape(9, 64, 7), "width must be a multiple of 32; got 7, nearest 32"),
    (VideoShape(8, 64, 96), r"frames must be 8n \+ 1; got 8, nearest 1 and 9"),
    (VideoShape(23, 64, 96), r"frames must be 8n \+ 1; got 23, nearest 17 and 25"),
)
ONE = ((VideoShape(1, 64, 96), "frames must be 9 or more, as the first is given; got 1"),)


def case(variant: str, **other: Any) -> Case:
    common: dict[str, Any] = {
        "family": "ltx_video",
        "variant": variant,
        "native": NATIVE,
        "off_native": VideoShape(9, 96, 64),
        "captions": ("clip 0", "clip 1, with  two spaces", "a far longer one, " * 12),
        "decode": decode,
        "vae_decode": vae_decode,
        "takes": frozenset({"lora_linear", "ada_norm", "qk_norm_rope"}),
        "refused": REFUSED,
    }
    return Case(**{**common, **other})


CASES = (
    case("ltx-video"),
    case(
        "ltx-video",
        model={"task": "i2v"},
        pictures=("image",),
        decode=decode_rest,
        vae_decode=vae_decode_rest,
        timesteps=of_the_sample,
        as_sampled=as_sampled,
        refused=(*REFUSED, *ONE),
    ),
    case("ltx-video-0.9.1", call_dtype=torch.bfloat16),
)
SMOKES = {
    "ltx_video": Smoke("ltx-video-0.9.1"),
    "ltx_video_i2v": Smoke("ltx-video", overrides=("data.image_dropout=0.5",), pictures=("images",)),
}
OTHERS = {"ltx_video_0.9": SMOKES["ltx_video"].change("ltx_video", "ltx-video")}
