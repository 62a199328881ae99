"""Writes a pipeline folder to train a video DiT from: VAE, text encoder, scheduler, config, and optionally weights.

No VDiT checkpoint is published in Diffusers' format, so this puts one together:

    python -c "from dit_lora.models.video_dit_base import write_base; write_base('video-dit-xl')"
    dit-lora convert opendit video-dit-mine --weights ema.pt
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler
from transformers import CLIPTextModel, CLIPTokenizer

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.environment.safetensors_files import read_tensors
from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import read_json, write_json
from dit_lora.models.opendit import convert_opendit, infer_opendit_config
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline
from dit_lora.models.videochat2.released import read_released_weights

VAE, TEXT_ENCODER = "stabilityai/sd-vae-ft-ema", "openai/clip-vit-base-patch32"
"""Hub ids of the VAE and the text encoder that OpenDiT uses."""


def write_base(
    folder: str | Path,
    *,
    vae: str = VAE,
    text_encoder: str | None = TEXT_ENCODER,
    config: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a base checkpoint for `VideoDiTPipeline` to `folder`; by default OpenDiT's text-conditional VDiT-XL/1x2x2.

    Args:
        folder: A folder that must not exist.
        vae: Hub id or folder; by default OpenDiT's.
        text_encoder: Hub id or folder; by default OpenDiT's. None for a class-conditional model.
        config: Replaces defaults of the transformer's config.
        state_dict: Weights with OpenDiT's names. None: no transformer weights; `model.from_scratch` initializes them.
            Its copy of CLIP is not read, because OpenDiT does not train CLIP.

    Raises:
        DitLoraError: Lists every tensor that is wrong or not finite.
    """
    # Refuse to write into an existing folder before anything is downloaded.
    folder = Path(folder)
    if folder.exists():
        raise DitLoraError(f"{folder} already exists; choose another folder")
    encoder = tokenizer = None
    if text_encoder is not None:
        encoder = load_pretrained(CLIPTextModel, text_encoder, use_safetensors=True)
        tokenizer = load_pretrained(CLIPTokenizer, text_encoder)
    # The training data decides the number of classes, so 1 is a placeholder.
    condition = {"text_dim": encoder.config.hidden_size} if encoder else {"num_classes": 1}
    with torch.device("meta"):
        model: Any = VideoDiTTransformer3DModel.from_config({**condition, **(config or {})})
    # Without weights, only the transformer's config is written, for training from scratch.
    weights = convert_opendit(state_dict, model.config) if state_dict else None
    pipeline: Any = VideoDiTPipeline(
        # The transformer is written below, with weights or only its config.
        transformer=None,  # type: ignore[arg-type]
        vae=load_pretrained(AutoencoderKL, vae, use_safetensors=True),
        scheduler=build_iddpm_scheduler(),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    if weights is None:
        model.save_config(folder / "transformer")
    else:
        # `assign` replaces the meta tensors by the converted ones, in their own dtype.
        model.load_state_dict(weights, strict=True, assign=True)
        model.save_pretrained(folder / "transformer", safe_serialization=True)
    # The pipeline was saved without its transformer, so add its class to the index.
    index = read_json(folder / "model_index.json")
    index["transformer"] = [type(model).__module__, type(model).__name__]
    write_json(folder / "model_index.json", index)
    return folder


def build_iddpm_scheduler() -> DDIMScheduler:
    """Diffusers scheduler with iDDPM's noise schedule.

    Sources: facebook/DiT-XL-2-256 (scheduler/scheduler_config.json), OpenDiT (create_diffusion), Latte
    (configs/t2x/t2v_sample.yaml).
    """
    return DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02, clip_sample=False)


def convert_checkpoint(
    folder: Path, weights: Path, *, heads: int | None = None, vae: str | None = None, text_encoder: str | None = None
) -> list[str]:
    """Write `folder` as a `VideoDiTPipeline` with the weights of a video model saved by OpenDiT v1.0.0.

    Returns lines of a report.

    `weights` is its ema.pt, a safetensors file, or a folder of shards. No code from a file is run.

    Raises:
        DitLoraError: The files are not such a checkpoint.
    """
    tensors = _read_weights(weights)
    config = infer_opendit_config(tensors, heads)
    # The shapes tell which condition the model has.
    with_text = "text_dim" in config
    if text_encoder and not with_text:
        raise DitLoraError("--text-encoder does not apply: this model is conditioned on classes")
    try:
        write_base(
            folder,
            vae=vae or VAE,
            text_encoder=(text_encoder or TEXT_ENCODER) if with_text else None,
            config=config,
            state_dict=tensors,
        )
    except OSError as error:
        raise DitLoraError(f"cannot read the VAE or the text encoder, or write {folder}: {error}") from error
    sizes = ", ".join(f"{name} {value}" for name, value in config.items())
    return [f"{folder}: {len(tensors)} tensors of {weights}", f"  {sizes}"]


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file, or of all weight files in a folder. Raises `DitLoraError` if there are none or duplicates."""
    # A folder may hold several shards; a file holds everything.
    if path.is_dir():
        files = [*sorted(path.glob("*.safetensors")), *sorted(path.glob("*.bin"))]
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise DitLoraError(f"{path} is not a file of weights or a folder with .bin or .safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        # Released .bin files are pickles, which are read without running any code in them.
        file_tensors = read_tensors(file) if file.suffix == ".safetensors" else read_released_weights(file).tensors
        # Shards of one checkpoint never share a name, so duplicates mean that two checkpoints are mixed.
        duplicates = sorted(file_tensors.keys() & tensors.keys())
        if duplicates:
            raise DitLoraError(format_list(f"{file} repeats tensors of another file", duplicates))
        tensors |= file_tensors
    return tensors
