"""A script as Diffusers publishes it, as far as its first steps: what a start of ours is measured against.

    python -m benchmarks.bare_start MODEL CLIPS OUT STEPS

It does what examples/cogvideo/train_cogvideox_lora.py does until then, in that order and with its imports, but for
torchvision's resizing: loads all models, attaches an adapter, decodes and encodes captions and clips, trains. Nothing
is checked, sampled or kept. One line in OUT/metrics.jsonl a step.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import torch
import transformers  # noqa: F401  (the example imports it)
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,  # noqa: F401  (the example imports it, and samples and saves by it)
    CogVideoXTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from diffusers.utils import export_to_video  # noqa: F401  (the example imports it)
from peft import LoraConfig, get_peft_model_state_dict  # noqa: F401  (the example saves by it)
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, T5EncoderModel

FRAMES, BATCH, RANK = 9, 2, 16
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


def main(argv: Sequence[str] | None = None) -> None:
    model, clips, run_dir, steps = sys.argv[1:] if argv is None else argv
    train(Path(model), Path(clips), Path(run_dir), int(steps))


def train(model: Path, clips: Path, run_dir: Path, steps: int) -> None:
    accelerator = Accelerator()
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(model, subfolder="tokenizer")
    text_encoder = T5EncoderModel.from_pretrained(model, subfolder="text_encoder")
    transformer = CogVideoXTransformer3DModel.from_pretrained(model, subfolder="transformer")
    vae = AutoencoderKLCogVideoX.from_pretrained(model, subfolder="vae")
    scheduler = CogVideoXDPMScheduler.from_pretrained(model, subfolder="scheduler")
    for frozen in (text_encoder, transformer, vae):
        frozen.requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights=True, target_modules=TARGETS)
    transformer.add_adapter(config)
    cast_training_params([transformer])
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    samples = encoded(clips, tokenizer, text_encoder, vae)
    loader: Any = DataLoader(samples, batch_size=BATCH, shuffle=True, drop_last=True)
    schedule = get_scheduler("constant", optimizer)
    transformer, optimizer, loader, schedule = accelerator.prepare(transformer, optimizer, loader, schedule)
    run_dir.mkdir(parents=True, exist_ok=True)
    step = 0
    while step < steps:
        for latents, captions in loader:
            began = time.perf_counter()
            loss = step_loss(transformer, scheduler, latents, captions)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            line = {"step": step, "loss": loss.item(), "seconds": time.perf_counter() - began}
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            if step == steps:
                break


@torch.no_grad()
def encoded(clips: Path, tokenizer: Any, text_encoder: Any, vae: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Latents (F, C, H, W) and caption embeddings (tokens, width) of every clip."""
    samples = []
    for line in (clips / "metadata.jsonl").read_text().splitlines():
        entry = json.loads(line)
        with av.open(str(clips / entry["file_name"])) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        video = torch.stack([torch.from_numpy(frame) for frame in frames[:FRAMES]])
        pixels = video.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        tokens = tokenizer(
            entry["text"],
            padding="max_length",
            max_length=226,
            truncation=True,
            return_tensors="pt",
        )
        samples.append((latents[0].permute(1, 0, 2, 3), text_encoder(tokens.input_ids)[0][0]))
    return samples


def step_loss(transformer: Any, scheduler: Any, latents: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
    """The example's loss: the error of x0, weighted by 1 / (1 - alpha_bar)."""
    config = transformer.config
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),))
    noisy = scheduler.add_noise(latents, noise, timesteps)
    frames, _, height, width = latents.shape[1:]
    grid = (height // config.patch_size, width // config.patch_size)
    rotary = get_3d_rotary_pos_embed(config.attention_head_dim, ((0, 0), grid), grid, frames)
    output = transformer(
        hidden_states=noisy,
        encoder_hidden_states=captions,
        timestep=timesteps,
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    predicted = scheduler.get_velocity(output, noisy, timesteps)
    weights = 1 / (1 - scheduler.alphas_cumprod[timesteps])
    while weights.ndim < predicted.ndim:
        weights = weights.unsqueeze(-1)
    return (weights * (predicted - latents) ** 2).flatten(1).mean(1).mean()


if __name__ == "__main__":
    main()
