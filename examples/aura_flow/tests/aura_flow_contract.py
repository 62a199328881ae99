"""What the contract's tests must know of AuraFlow: shapes, captions and how its pipeline decodes."""

from typing import Any

import torch
from family_cases.case import Call, Case, Smoke, captioned_images

from dit_lora.config.data import VideoShape


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents, as AuraFlowPipeline.__call__ does."""
    return pipeline.vae.decode(clean / pipeline.vae.config.scaling_factor).sample


def scale_timesteps(call: Call) -> torch.Tensor:
    """Timesteps as `predict` takes them: the pipeline divides them by 1000."""
    return (call["timestep"].double() * 1000).float()


CASES = (
    Case(
        family="aura_flow",
        variant="aura-flow",
        native=VideoShape(1, 64, 96),
        off_native=VideoShape(1, 96, 32),
        captions=("picture 0", "a Picture 1", "a longer caption than both, 2"),
        decode=decode,
        vae_decode=lambda pipeline, mean: pipeline.vae.decode(mean).sample,
        timesteps=scale_timesteps,
        takes=frozenset({"lora_linear"}),
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 144), "width can be 128 at most, where its positions end"),
            (VideoShape(9, 64, 96), "frames must be 1, AuraFlow makes images; got 9"),
        ),
    ),
)
SMOKES = {"aura_flow": Smoke("aura-flow", captioned_images)}
