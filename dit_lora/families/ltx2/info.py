"""Facts of an LTX-2, LTX-2.3 or LTX-2.5 checkpoint, and of the recipe that it is trained with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar, Self

from diffusers import LTX2Pipeline

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo
from dit_lora.families.flow_matching import require_min_steps
from dit_lora.families.ltx2.layers import ATTENTION_LAYERS, refuse_sound_layers
from dit_lora.families.opening import get_call_default
from dit_lora.families.refusals import KEEP_DISTILLATION, frame_count_errors, side_errors

PIPELINE_MULTIPLE = 32  # required by check_inputs of both pipelines, for any autoencoder


@dataclass(frozen=True, kw_only=True)
class LTX2Info(CheckpointInfo):
    """Info (configs, supported shapes) of an LTX-2, LTX-2.3 or LTX-2.5 checkpoint for text-to-video."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    connectors: Mapping[str, Any]
    """The connectors' config."""
    audio_vae: Mapping[str, Any]
    """The audio VAE's config."""
    text_model_type: str | None = None
    """Transformers' name of the text encoder's model: `gemma3`, or `gemma4_unified` in LTX-2.5."""
    has_sound: bool = False
    """True if sound is trained with the video (`data.sound`)."""
    fps: float | None = None
    """Frames per second: positions are in seconds. None for the pipeline's default."""
    pipeline_class: ClassVar[Any] = LTX2Pipeline
    supported_options: ClassVar[tuple[str, ...]] = ("model.task", "data.sound")

    @property
    def is_distilled(self) -> bool:
        """True if an LTX-2 checkpoint generates videos in few steps.

        Its scheduler does not shift by size, unlike the base model's.
        """
        return not self.scheduler["use_dynamic_shifting"]

    @property
    def frame_rate(self) -> float:
        return self.fps or get_call_default(self.pipeline_class, "frame_rate")

    @property
    def size_multiple(self) -> int:
        # Temporal factor first, then those of height and width.
        _, *sides = self.transformer_config["vae_scale_factors"]
        return lcm(PIPELINE_MULTIPLE, *sides)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape that LTX-2 does not support.

        Frames must be 8n + 1: the pipeline silently drops the rest.
        """
        temporal = self.transformer_config["vae_scale_factors"][0]
        return [*side_errors(shape, self.size_multiple), *frame_count_errors(shape.frames, temporal)]

    def caption_tensor_width(self, modality: str) -> int:
        """Width of a caption's cached tensors for one modality, `video` or `audio`."""
        # The connectors' output has as many channels as their attention.
        heads, width = (
            self.connectors[f"{modality}_connector_{name}"] for name in ("num_attention_heads", "attention_head_dim")
        )
        return int(heads * width)

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Apply the recipe's frame rate, which sets positions, and its sound option.

        Raises `DitLoraError` for a distilled base model and for layers that would get no gradient.
        """
        info = super().copy_with_recipe_settings(recipe, training_options)
        data = recipe.data
        if self.is_distilled and not recipe.has_distillation_safeguard:
            raise DitLoraError(
                f"{self.path.name} is step-distilled (its scheduler does not shift by size), and training on it "
                "undoes that; train its base, whose adapter loads into both, and sample from this one with "
                f"validation.model; or {KEEP_DISTILLATION}"
            )
        # Check now: otherwise validation samples would fail in the middle of a run.
        steps = recipe.validation.inference_steps
        require_min_steps(self.scheduler, steps, "validation.inference_steps")
        if not data.sound:
            refuse_sound_layers(recipe)
        return replace(info, fps=data.fps, has_sound=data.sound)

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """Default LoRA targets of LTX-2: the video's attention layers, or all attention layers if sound is trained."""
        return ATTENTION_LAYERS if self.has_sound else tuple(defaults)

    def training_metadata(self) -> dict[str, Any]:
        # Recorded only where it is on: adapters from before the option have no entry.
        return super().training_metadata() | ({"sound": True} if self.has_sound else {})

    def copy_with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        # Frames per second are one of the common fields of the header.
        fps = metadata.get("video", {}).get("fps", self.fps)
        # Adapters from before the option have no entry.
        has_sound = metadata.get("sound", self.has_sound)
        return replace(super().copy_with_training_metadata(metadata), fps=fps, has_sound=has_sound)

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        if self.has_sound:
            return ["sound: trained with the video; samples have sound"]
        # The pipeline generates sound with every video, so say why samples have none.
        return ["sound: not trained (data.sound=false); samples have no sound"]

    def pipeline_components(self) -> dict[str, Any]:
        """None for the prompt enhancer and the duration head that LTX-2.5 lists, so that their files may be missing.

        Neither captions nor samples use them.
        """
        return dict.fromkeys(self.pipeline_class._optional_components)
