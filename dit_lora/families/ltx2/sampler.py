"""LTX-2's sampler: the stock pipeline, with or without its sound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.data.media.sound import Sound
from dit_lora.families.base import Sampler, Sampling, Tensors
from dit_lora.families.flow_matching import require_min_steps
from dit_lora.families.ltx2.guidance import guidance_kwargs
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.families.ltx2.text import bypass_connectors, join_prompt_tensors


@dataclass(frozen=True, kw_only=True)
class LTX2Sampler(Sampler):
    """LTX-2's pipeline arguments for the tasks without references."""

    info: LTX2Info
    frames_argument = "num_frames"

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # Without the text encoder, the connectors are not needed either.
        components = {} if text else {"connectors": None}
        return self._load_pipeline(dtype, transformer, text, **components)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        return {"prompt": prompt} if isinstance(prompt, str) else join_prompt_tensors(prompt, empty_prompt)

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), "frame_rate": float(self.info.frame_rate)}

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """LTX-2's pipeline arguments for frame rate and guidance.

        Raises `DitLoraError` for a single step if its timestep would be NaN.
        """
        require_min_steps(self.info.scheduler, sampling.inference_steps, f"{self.info.path.name}: inference steps")
        # Without a frame rate, that of `shape_kwargs` applies.
        rate = {} if sampling.fps is None else {"frame_rate": float(sampling.fps)}
        perturbed = self.info.transformer_config["perturbed_attn"]
        return rate | guidance_kwargs(sampling.guidance_scale, has_perturbed_attention=perturbed)

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        # Cached prompts are the connectors' output, which must not pass through them again.
        with bypass_connectors(pipeline, prompt_kwargs, self.info.caption_tensor_width("video")):
            return super().generate(pipeline, prompt_kwargs, sampling)

    def generate_with_sound(
        self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling
    ) -> tuple[torch.Tensor, Sound | None]:
        if not self.info.has_sound:
            return super().generate_with_sound(pipeline, prompt_kwargs, sampling)
        # The base class returns only the video, so keep the sound of the pipeline's output on the way.
        waveforms: list[torch.Tensor] = []

        def call_pipeline(**arguments: Any) -> Any:
            output = pipeline(**arguments)
            waveforms.extend(output.audio)
            return output

        with bypass_connectors(pipeline, prompt_kwargs, self.info.caption_tensor_width("video")):
            video = super().generate(call_pipeline, prompt_kwargs, sampling)
        return video, Sound(waveforms[0], pipeline.vocoder.config.output_sampling_rate)
