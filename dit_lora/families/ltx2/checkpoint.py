"""Opens LTX-2 checkpoints: 2.0, 2.3 and 2.5. Their configs say what differs between the three."""

from collections.abc import Mapping
from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import build_flow_matching, read_flow_scheduler
from dit_lora.families.ltx2 import in_context
from dit_lora.families.ltx2.denoiser import LTX2Denoiser
from dit_lora.families.ltx2.encoders import LTX2Encoders
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.families.ltx2.sampler import LTX2Sampler
from dit_lora.families.opening import (
    fill_config_defaults,
    read_checkpoint,
    read_component_config,
    require_complete_weights,
)
from dit_lora.numerics.noise_levels import NoiseLevelDistribution

# Tasks by the pipeline class in model_index.json. Any other class is text-to-video.
_TASKS = {LTX2ImageToVideoPipeline.__name__: "i2v", LTX2InContextPipeline.__name__: "ic_lora"}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an LTX-2, LTX-2.3 or LTX-2.5 checkpoint. Raises as `DiffusionFamily.open` does."""
    # Older files lack options. The checks below need all of them.
    index, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=None,
        transformer_class=LTX2VideoTransformer3DModel,
        vae_class=AutoencoderKLLTX2Video,
    )
    path = fields["path"]
    parts = {"connectors": LTX2TextConnectors, "audio_vae": AutoencoderKLLTX2Audio}
    fields |= {name: fill_config_defaults(kind, read_component_config(path, name)) for name, kind in parts.items()}
    _require_matching_components(model, fields)
    require_complete_weights(model, path, "vae", "audio_vae", "vocoder", "connectors", "text_encoder")
    scheduler = read_flow_scheduler(model, path)
    # The recipe's task wins, because all tasks use the same weights.
    stored_task = _TASKS.get(index["_class_name"], "t2v")
    task = model.task or stored_task
    # The vendor's noise levels.
    objective = build_flow_matching(scheduler, NoiseLevelDistribution(density="stretched_logit_normal"))
    # Facts that all tasks share.
    text_model_type = read_component_config(path, "text_encoder").get("model_type")
    facts = {
        **fields,
        "scheduler": scheduler,
        "text_model_type": text_model_type,
        "has_task_override": task != stored_task,
    }
    # All tasks use the same files.
    if task == "ic_lora":
        return in_context.compose_checkpoint(objective, **facts)
    if task == "i2v":
        # Import late: it needs PyAV, which the pipeline needs only for images too.
        from dit_lora.families.ltx2 import image_to_video

        return image_to_video.compose_checkpoint(objective, **facts)
    info = LTX2Info(**facts)
    denoiser = LTX2Denoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, LTX2Encoders, LTX2Sampler)


def _require_matching_components(model: ModelConfig, fields: Mapping[str, Any]) -> None:
    """Raise `DitLoraError` if latent channels, patches or text projections of the components do not fit together."""
    transformer, vae, connectors, audio = (
        fields[name] for name in ("transformer_config", "vae_config", "connectors", "audio_vae")
    )
    # The transformer computes positions with these factors, so they must be the VAE's.
    temporal, *sides = transformer["vae_scale_factors"]
    # A sound token holds all channels of a quarter of the mel bins.
    channels, sounds = vae["latent_channels"], audio["latent_channels"] * (audio["mel_bins"] // 4)
    expected: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": channels,
        "audio_in_channels": sounds,
        "audio_out_channels": sounds,
        **{f"{kind}patch_size{axis}": 1 for kind in ("", "audio_") for axis in ("", "_t")},
        "audio_sampling_rate": audio["sample_rate"],
        "audio_hop_length": audio["mel_hop_length"],
    }
    problems = [
        f"transformer: {name} must be {value}; got {transformer[name]}"
        for name, value in expected.items()
        if transformer[name] != value
    ]
    # The VAE's config may leave its ratios out (None).
    ratios = vae["spatial_compression_ratio"], vae["temporal_compression_ratio"]
    if (None not in ratios and {*sides} != {ratios[0]}) or ratios[1] not in (None, temporal):
        problems.append(
            f"transformer: vae_scale_factors {[temporal, *sides]} are not the VAE's, {ratios[1]} and {ratios[0]}"
        )
    # Exactly one of connectors and transformer projects the text to the width of each modality.
    projected = transformer["use_prompt_embeddings"]
    if projected == connectors["per_modality_projections"]:
        problems.append(
            f"connectors: per_modality_projections {connectors['per_modality_projections']} with the transformer's "
            f"use_prompt_embeddings {projected}: one of them projects the text, as in 2.3 or as in 2.0"
        )
    if problems:
        raise DitLoraError(format_list(f"{model.path}: the parts of this checkpoint do not fit", problems))
