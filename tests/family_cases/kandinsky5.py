"""Kandinsky 5.0. Its pipeline hides no padding of several prompts, and the family calls the network for each."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke

LATENTS = 4


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; Kandinsky5T2VPipeline.__call__ ends so."""
    return pipeline.vae.decode(clean / pipeline.vae.config.scaling_factor).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


def channels_first(output: torch.Tensor) -> torch.Tensor:
    return output.permute(0, 4, 1, 2, 3)


def noisy(call: Call) -> torch.Tensor:
    """Without the condition and its mask, which stand in channels of their own."""
    return channels_first(call["hidden_states"][..., :LATENTS])


CASES = (
    Case(
        family="kandinsky5",
        variant="kandinsky-5-t2v",
        native=VideoShape(9, 64, 96),
        off_native=VideoShape(5, 96, 32),
        captions=("clip 0", "clip 1, with  two spaces &amp; a sign", "a far longer one, " * 25),
        decode=decode,
        vae_decode=vae_decode,
        noisy=noisy,
        predicted=channels_first,
        call_dtype=torch.bfloat16,
        takes_several_prompts=False,
        takes=frozenset({"lora_linear"}),
        # In fp32 too its attention rounds queries and keys to bf16, which makes 2**-8 of a last bit.
        fused_tolerance=1e-3,
        refused=(
            (VideoShape(9, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(9, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(8, 64, 96), r"frames must be 4n \+ 1; got 8, nearest 5 and 9"),
            (VideoShape(513, 64, 96), "frames can be 509 at most, where its positions end"),
            (VideoShape(9, 64, 2064), "width can be 2048 at most, where its positions end"),
        ),
    ),
)
SMOKES = {"kandinsky5": Smoke("kandinsky-5-t2v")}
