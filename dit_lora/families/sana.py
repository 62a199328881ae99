"""Sana text-to-image, 1.0 and 1.5, of every size: flow matching on the latents of DC-AE, conditioned by Gemma 2.

Prompts and denoising are the stock pipeline's own code, called here (diffusers/pipelines/sana/pipeline_sana.py).
What SANA-Video does alike is here as functions that `sana_video` calls.

Shapes: B batch, T text tokens, C latent channels, H and W latent size.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    UniPCMultistepScheduler,
)
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
    load_or_init,
    local_checkpoint,
    read_component_config,
    refuse_options,
    require_whole_weights,
    to_uint8,
)
from dit_lora.families.sana_attention import keep_linear_attention_fp32
from dit_lora.families.sana_text import (
    gemma_conditions,
    gemma_encoder,
    gemma_facts,
    gemma_limit,
    gemma_spec,
)
from dit_lora.families.tiny_sana import build_sana
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.preflight import stored_dtype
from dit_lora.numerics.streams import Streams, moved, normal
from dit_lora.objectives import FlowMatching, LossOutput, mean_squared_error
from dit_lora.pretrained import load_pretrained

# Changes whenever the same pixels would be encoded otherwise; part of each image's cache key.
IMAGE_TRANSFORM = "sana-1: pixels / 127.5 - 1, latent"
_PIPELINE_MULTIPLE = 32  # SanaPipeline.check_inputs, whatever the autoencoder
# In a model_index.json of ours; Diffusers passes over what begins with an underscore.
_TRAINED_IN = "_trained_in"
# The checkpoints that Sana's model zoo lists as fp16 (NVlabs/Sana, asset/docs/model_zoo.md); those in bf16
# end in _BF16 or are SANA1.5.
_FP16_TRAINED = re.compile(r"Sana_(600M|1600M)_(512|1024)px(_MultiLing)?(_diffusers)?")

# to_q, to_k and to_v are what Diffusers' train_dreambooth_lora_sana.py adapts; of self and cross attention.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
GROUP_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "connector": (
        "patch_embed*",
        "time_embed.*",
        "caption_projection.*",
        "caption_norm.*",
        "scale_shift_table",
        "proj_out.*",
    ),
    "backbone": ("transformer_blocks.*",),
}


@dataclass(frozen=True)
class SanaCheckpoint:
    """One Sana text-to-image checkpoint."""

    path: Path
    transformer_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    objective: FlowMatching
    saturates: bool
    """Trained in fp16, whose limit its linear attention relies on."""
    from_scratch: Mapping[str, Any] | None = None
    pipeline_class: ClassVar[Any] = SanaPipeline

    @property
    def train_timesteps(self) -> int:
        return self.objective.train_timesteps

    @property
    def side_step(self) -> int:
        factor = 2 ** (len(self.vae_config["encoder_block_out_channels"]) - 1)
        return lcm(_PIPELINE_MULTIPLE, factor * self.transformer_config["patch_size"])

    def text_limit(self) -> TextLimit:
        return gemma_limit(self.path, SanaPipeline)

    def check_shape(self, shape: VideoShape) -> None:
        wrong = wrong_sides(shape, self.side_step)
        if shape.frames != 1:
            wrong.append(f"data.frames must be 1, Sana makes images; got {shape.frames}")
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} cannot take this shape", wrong))

    def for_recipe(self, recipe: Recipe) -> "SanaCheckpoint":
        self.check_shape(VideoShape.of(recipe.data))
        refuse_options(recipe)
        return self

    def text_facts(self) -> dict[str, Any]:
        return gemma_facts(self.path, SanaPipeline)

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": IMAGE_TRANSFORM}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return gemma_spec(SanaPipeline, self.transformer_config["caption_channels"], dtype)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        return gemma_encoder(SanaPipeline, self.path, dtype, device)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Keeps the latent, (C, H, W): DC-AE has no posterior. It encodes in fp32 whatever `dtype` is."""
        vae: Any = load_pretrained(
            AutoencoderDC, self.path, subfolder="vae", dtype=torch.float32, use_safetensors=True
        ).to(device)
        memory.set(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return {"latent_mean": vae.encode(pixels.to(device).float() / 127.5 - 1).latent[0]}

        return encode

    def load_transformer(self, dtype: torch.dtype) -> SanaTransformer2DModel:
        transformer = load_or_init(SanaTransformer2DModel, self.path, dtype, self.from_scratch)
        keep_linear_attention_fp32(transformer, saturates=self.saturates)
        return transformer

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Velocity losses at logit-normal, shifted noise levels; noising, target and loss are fp32."""
        clean = batch["latent_mean"].float() * self.vae_config["scaling_factor"]

        def predict(noisy: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
            return self.predict(transformer, noisy, timesteps, batch)

        return flow_losses(self.objective, predict, clean, streams)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The network's velocity for noisy latents; one call equals one of the stock pipeline's."""
        prompt_embeds = batch["prompt_embeds"]
        return transformer(
            noisy_BCHW.to(prompt_embeds.dtype),
            encoder_hidden_states=prompt_embeds,
            encoder_attention_mask=batch["prompt_attention_mask"],
            timestep=timesteps * self.transformer_config.get("timestep_scale", 1.0),
            return_dict=False,
        )[0]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> SanaPipeline:
        """With the autoencoder in fp32, and fp16's limit where the checkpoint relies on it."""
        given: Any = transformer
        if given is None and self.saturates:
            given = self.load_transformer(dtype)
        return stock_pipeline(SanaPipeline, self.path, dtype, given, text)

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        return gemma_conditions(prompt, empty)

    def index_changes(self) -> dict[str, Any]:
        """Trained further in full it is stored in fp32, and relies on fp16's limit as before."""
        return {_TRAINED_IN: "fp16"} if self.saturates else {}

    def as_trained(self, index: Mapping[str, Any]) -> "SanaCheckpoint":
        return self

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        # Without binning: the shape that was asked for, not the nearest of the pipeline's list.
        images = pipeline(
            **conditions,
            height=how.shape.height,
            width=how.shape.width,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            use_resolution_binning=False,
            output_type="np",
        ).images
        return to_uint8(images)


class Sana:
    """Sana text-to-image: 0.6B, 1.6B, and 1.5 of 1.6B and 4.8B."""

    name = "sana"
    lora_targets = LORA_TARGETS
    group_patterns = GROUP_PATTERNS
    tiny_variants = ("sana-600m", "sana-1.5", "sana-fp16")
    pipeline_names = ("SanaPipeline",)

    def open(self, model: ModelConfig) -> SanaCheckpoint:
        opened = open_sana(model, self.name, SanaPipeline)
        drawn = model.from_scratch is not None
        return SanaCheckpoint(
            **opened,
            vae_config=read_component_config(opened["path"], "vae"),
            saturates=not drawn and trained_in_fp16(opened["path"], model),
        )

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_sana(out, seed=seed, qk_norm=variant == "sana-1.5", half=variant == "sana-fp16")


def trained_in_fp16(path: Path, model: ModelConfig) -> bool:
    """Whether the transformer was trained in fp16: so it is stored, alone or as the fp16 variant, or so it is known.

    The name counts last, for a published checkpoint of which only the fp32 file was fetched.
    """
    files = sorted((path / "transformer").glob("*.safetensors"))
    return (
        any(".fp16" in file.name for file in files)
        or stored_dtype(files) is torch.float16
        or read_component_config(path).get(_TRAINED_IN) == "fp16"
        or _FP16_TRAINED.fullmatch(model.path.rstrip("/").split("/")[-1]) is not None
    )


def open_sana(model: ModelConfig, family: str, pipeline_class: Any) -> dict[str, Any]:
    """What both families read of a checkpoint; refuses another pipeline, another objective, torn weights."""
    path = local_checkpoint(model)
    found = read_component_config(path).get("_class_name")
    if found != pipeline_class.__name__:
        raise DitLoraError(
            f"{model.path} is a {found} checkpoint; family {family} trains {pipeline_class.__name__}"
        )
    objective = flow_objective(model, read_component_config(path, "scheduler"))
    drawn = model.from_scratch is not None
    require_whole_weights(path, ("vae", "text_encoder", *(() if drawn else ("transformer",))))
    config = read_component_config(path, "transformer") | dict(model.from_scratch or {})
    return {
        "path": path,
        "transformer_config": config,
        "objective": objective,
        "from_scratch": model.from_scratch,
    }


def flow_objective(model: ModelConfig, scheduler: Mapping[str, Any]) -> FlowMatching:
    """The objective that the checkpoint's scheduler says, with its shift.

    Solvers call it `flow_shift`, FlowMatchEulerDiscreteScheduler `shift`. The latter, made from a solver's
    config, would silently have shift 1.
    """
    name = scheduler.get("_class_name")
    timesteps = scheduler.get("num_train_timesteps", 1000)
    if name == FlowMatchEulerDiscreteScheduler.__name__:
        if scheduler.get("use_dynamic_shifting"):
            raise DitLoraError(
                f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting); Sana's "
                "checkpoints have one shift"
            )
        config: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler)).config
        return FlowMatching(float(config.shift), timesteps)
    solvers = {
        kind.__name__: kind for kind in (DPMSolverMultistepScheduler, UniPCMultistepScheduler)
    }
    if name not in solvers:
        raise DitLoraError(
            f"{model.path}: scheduler {name} is not one that Sana is published with: "
            f"{', '.join([*solvers, FlowMatchEulerDiscreteScheduler.__name__])}"
        )
    config = solvers[name].from_config(dict(scheduler)).config
    if config.prediction_type != "flow_prediction" or not config.use_flow_sigmas:
        raise DitLoraError(
            f"{model.path}: Sana predicts the flow, but its scheduler says prediction_type="
            f"{config.prediction_type}, use_flow_sigmas={config.use_flow_sigmas}"
        )
    return FlowMatching(float(config.flow_shift), timesteps)


def flow_losses(
    objective: FlowMatching,
    predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    clean: torch.Tensor,
    streams: Streams,
) -> LossOutput:
    """Losses per sample of a network that predicts velocity; fp32 but for the network itself."""
    noise = moved(normal(clean.shape[1:], streams("noise")), clean.device)
    sigmas = moved(objective.sigmas(normal((), streams("timestep"))), clean.device)
    noisy = objective.add_noise(clean, noise, sigmas)
    prediction = predict(noisy, sigmas * objective.train_timesteps)
    target = objective.target(clean, noise)
    return LossOutput(mean_squared_error(prediction, target), objective.reported(sigmas))


def stock_pipeline(
    pipeline_class: Any, path: Path, dtype: torch.dtype, transformer: nn.Module | None, text: bool
) -> Any:
    """Its autoencoder in fp32, as Sana's and Diffusers' own scripts keep it."""
    given: dict[str, Any] = {} if transformer is None else {"transformer": transformer}
    if not text:
        given |= {"text_encoder": None, "tokenizer": None}
    dtypes = {"vae": torch.float32, "default": dtype}
    return load_pretrained(pipeline_class, path, dtype=dtypes, use_safetensors=True, **given)


def wrong_sides(shape: VideoShape, step: int) -> list[str]:
    """What is wrong with height and width, with the nearest that work."""
    return [
        f"data.{name} must be a multiple of {step}; got {value}, nearest "
        + (f"{value // step * step} and " if value >= step else "")
        + f"{value // step * step + step}"
        for name, value in (("height", shape.height), ("width", shape.width))
        if value % step
    ]


FAMILY = Sana()
