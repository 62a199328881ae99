"""Opens the toy's checkpoints: an objective and a pipeline of its own, and the other roles of Stable Diffusion 3."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from diffusers import StableDiffusion3Pipeline

from dit_lora.config.recipe import ModelConfig
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.sd3.checkpoint import SD3Denoiser, SD3Encoders, SD3Info, SD3Sampler
from dit_lora.families.sd3.checkpoint import open_checkpoint as open_sd3_checkpoint


class ToyPipeline(StableDiffusion3Pipeline):
    """The pipeline that the toy's model_index.json names."""


@dataclass(frozen=True, kw_only=True)
class ToyInfo(SD3Info):
    pipeline_class: ClassVar[Any] = ToyPipeline

    def training_metadata(self) -> dict[str, Any]:
        return {**super().training_metadata(), "toy": True}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    stored = open_sd3_checkpoint(family, model)
    info, denoiser = ToyInfo(**vars(stored.info)), stored.denoiser
    assert isinstance(denoiser, SD3Denoiser)
    objective = replace(denoiser.objective, shift=1.0)
    return Checkpoint(
        info=info,
        encoders=SD3Encoders(info=info),
        denoiser=SD3Denoiser(info=info, objective=objective),
        sampler=SD3Sampler(info=info),
    )
