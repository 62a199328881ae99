"""A folder to train a video DiT from: VAE, text encoder, scheduler, config; with weights if OpenDiT's are given.

No VDiT checkpoint is published in Diffusers' format, so this puts one together:

    python -c "from dit_lora.models.video_dit_base import write_base; write_base('video-dit-xl')"
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler
from transformers import CLIPTextModel, CLIPTokenizer

from dit_lora.errors import DitLoraError
from dit_lora.models.opendit import convert_opendit
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline
from dit_lora.parsing import read_json
from dit_lora.pretrained import load_pretrained


def write_base(
    out: str | Path,
    *,
    vae: str = "stabilityai/sd-vae-ft-ema",
    text_encoder: str | None = "openai/clip-vit-base-patch32",
    config: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `out`, which must not exist, as a `VideoDiTPipeline`; by default OpenDiT's VDiT-XL/1x2x2 of text.

    `vae` and `text_encoder` are Hub ids or folders, OpenDiT's own by default; `text_encoder` None makes a model
    of classes. `config` goes over the transformer's defaults. Without `state_dict`, of OpenDiT's names, there
    are no transformer weights: `model.from_scratch` draws them. OpenDiT does not train CLIP, so its copy in
    `state_dict` is not read.
    """
    out = Path(out)
    if out.exists():
        raise DitLoraError(f"{out} exists; choose another folder")
    encoder = tokenizer = None
    if text_encoder is not None:
        encoder = load_pretrained(CLIPTextModel, text_encoder, use_safetensors=True)
        tokenizer = load_pretrained(CLIPTokenizer, text_encoder)
    # How many classes there are is the data's to say.
    condition = {"text_dim": encoder.config.hidden_size} if encoder else {"num_classes": 1}
    with torch.device("meta"):
        model: Any = VideoDiTTransformer3DModel.from_config({**condition, **(config or {})})
    weights = convert_opendit(state_dict, model.config).transformer if state_dict else None
    pipeline: Any = VideoDiTPipeline(
        transformer=None,  # type: ignore[arg-type]
        vae=load_pretrained(AutoencoderKL, vae, use_safetensors=True),
        # iDDPM's, as OpenDiT's create_diffusion has it.
        scheduler=DDIMScheduler(
            beta_schedule="linear", beta_start=0.0001, beta_end=0.02, clip_sample=False
        ),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )
    pipeline.save_pretrained(out, safe_serialization=True)
    if weights is None:
        model.save_config(out / "transformer")
    else:
        model.load_state_dict(weights, strict=True, assign=True)
        model.save_pretrained(out / "transformer", safe_serialization=True)
    index = read_json(out / "model_index.json")
    index["transformer"] = [type(model).__module__, type(model).__name__]
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return out
