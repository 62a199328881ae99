"""A minimal loop in the style of Diffusers' train_cogvideox_lora.py, as people run it, without any guard.

    python stock_loop.py CHECKPOINT OUT [--guard] [--nan-sample N] [--steps N]

The body is the published script's: it draws noise and timesteps, calls `accelerator.backward`,
`accelerator.clip_grad_norm_`, `optimizer.step`, `lr_scheduler.step`, and saves with `save_lora_weights`.
`--guard` adds the two lines and nothing else.
"""

import argparse
import math
import time

import torch
from accelerate import Accelerator
from diffusers import CogVideoXDPMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict


def dataset(nan_sample: int | None) -> list[dict[str, torch.Tensor]]:
    """Five encoded clips; one NaN in one of them if asked for."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "latents": torch.randn(3, 4, 4, 6, generator=generator),
            "prompt_embeds": torch.randn(226, 32, generator=generator),
        }
        for _ in range(5)
    ]
    if nan_sample is not None:
        samples[nan_sample]["latents"][1, 2, 3, 4] = math.nan
    return samples


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--nan-sample", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=1)
    return parser.parse_args()


def adapted(checkpoint: str) -> CogVideoXTransformer3DModel:
    transformer = CogVideoXTransformer3DModel.from_pretrained(checkpoint, subfolder="transformer")
    transformer.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=True, target_modules=targets))
    cast_training_params([transformer])
    return transformer.train()


def loss_of(
    transformer: torch.nn.Module, scheduler: CogVideoXDPMScheduler, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The script's own form: the error of x0, weighted by 1 / (1 - alpha_bar)."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),)).long()
    noisy = scheduler.add_noise(latents, noise, timesteps)
    output = transformer(
        hidden_states=noisy,
        encoder_hidden_states=batch["prompt_embeds"],
        timestep=timesteps,
        return_dict=False,
    )[0]
    prediction = scheduler.get_velocity(output, noisy, timesteps)
    weights = (1 / (1 - scheduler.alphas_cumprod[timesteps])).view(-1, 1, 1, 1, 1)
    errors = (weights * (prediction - latents) ** 2).reshape(len(latents), -1)
    return torch.mean(errors, dim=1).mean()


def main() -> None:
    args = arguments()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(7)
    scheduler = CogVideoXDPMScheduler.from_pretrained(args.checkpoint, subfolder="scheduler")
    transformer = adapted(args.checkpoint)
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-4)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=args.steps)
    loader = torch.utils.data.DataLoader(dataset(args.nan_sample), batch_size=2, shuffle=True)
    transformer, optimizer, loader, lr_scheduler = accelerator.prepare(transformer, optimizer, loader, lr_scheduler)
    if args.guard:
        import dit_lora

        dit_lora.Guard.attach(accelerator, transformer, optimizer, folder=args.out)

    step = 0
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(transformer):
                loss = loss_of(transformer, scheduler, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step >= args.steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        lora = get_peft_model_state_dict(accelerator.unwrap_model(transformer))
        CogVideoXPipeline.save_lora_weights(args.out, transformer_lora_layers=lora)
    time.sleep(0.1)  # gloo lets go of its last tensors (docs/log.md)
    accelerator.end_training()


if __name__ == "__main__":
    main()
