"""HunyuanVideo-1.5."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from dit_lora.families.tiny.vae import LATENT_CHANNELS
from family_cases.case import Call, Case, Smoke


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; HunyuanVideo15Pipeline.__call__ ends so."""
    return pipeline.vae.decode(clean / pipeline.vae.config.scaling_factor, return_dict=False)[0]


def noisy(call: Call) -> torch.Tensor:
    """The latents, which are followed by the channels of a given image."""
    return call["hidden_states"][:, :LATENT_CHANNELS]


CASES = (
    Case(
        family="hunyuan_video15",
        variant="hunyuan-video-1.5",
        native=VideoShape(5, 32, 48),
        off_native=VideoShape(9, 48, 16),
        captions=("clip 0", 'a sign that says "open", 1', "a longer caption, of a disc below a square, 2"),
        decode=decode,
        vae_decode=lambda pipeline, mean: pipeline.vae.decode(mean).sample,
        noisy=noisy,
        # Its autoencoder cannot decode two videos at once without slicing: its attention mask has another shape.
        takes_several_prompts=False,
        takes=frozenset({"lora_linear"}),
        refused=(
            (VideoShape(5, 30, 48), "height must be a multiple of 4; got 30, nearest 28 and 32"),
            (VideoShape(5, 32, 3), "width must be a multiple of 4; got 3, nearest 4"),
            (VideoShape(8, 32, 48), r"frames must be 2n \+ 1; got 8, nearest 7 and 9"),
        ),
    ),
)
SMOKES = {"hunyuan_video15": Smoke("hunyuan-video-1.5")}
