"""DiT."""

from typing import Any
from unittest import mock

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Case, Smoke, class_folders


class _NoSteps:
    """A scheduler of no steps: the pipeline decodes what it begins with."""

    timesteps = ()

    def set_timesteps(self, _steps: int) -> None: ...


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    pipeline.register_modules(scheduler=_NoSteps())
    pipeline.set_progress_bar_config(disable=True)
    with mock.patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", return_value=clean):
        return pipeline([0], guidance_scale=1.0, output_type="pt").images


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return (pipeline.vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)


CASES = (
    Case(
        family="dit",
        variant="dit-tiny",
        native=VideoShape(1, 32, 32),
        captions=("goldfish", "tabby cat", "285"),
        decode=decode,
        vae_decode=vae_decode,
        takes_several_prompts=False,
        refused=(
            (VideoShape(1, 64, 32), "data.height must be 32; got 64"),
            (VideoShape(1, 32, 48), "data.width must be 32; got 48"),
            (VideoShape(9, 32, 32), "data.frames must be 1, for images; got 9"),
        ),
    ),
)
SMOKES = {
    "dit": Smoke("dit-tiny", class_folders, ("data.flip=true",), prompt="red disc"),
    "dit_scratch": Smoke("dit-tiny", class_folders, prompt="blue square"),
}
