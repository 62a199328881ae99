"""A text encoder and a denoiser, trained together with Accelerate by one optimizer, and a frozen autoencoder."""

import itertools

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
PRELOAD = "accelerate"


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.context = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, noisy, context):
        return self.head((self.body(noisy) + self.context(context)).relu())


accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
images = plant.spoil_samples(torch.randn(24, 6))
captions = torch.randint(0, 20, (24, 5))
vae = nn.Linear(6, 4).requires_grad_(False)
text_encoder = nn.EmbeddingBag(20, 6)
denoiser = Denoiser()
parameters = itertools.chain(denoiser.parameters(), text_encoder.parameters())
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
loader = DataLoader(TensorDataset(images, captions), batch_size=4, shuffle=True)
denoiser, text_encoder, optimizer, loader = accelerator.prepare(denoiser, text_encoder, optimizer, loader)

for _epoch in range(2):
    for pixels, tokens in loader:
        with accelerator.accumulate(denoiser, text_encoder):
            latents = vae(pixels)
            noise = torch.randn_like(latents)
            prediction = denoiser(latents + 0.5 * noise, text_encoder(tokens))
            loss = plant.spoil_loss((prediction - noise).square().mean())
            accelerator.backward(loss)
            plant.spoil_gradient(denoiser)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_([*denoiser.parameters(), *text_encoder.parameters()], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        plant.spoil_between_steps(denoiser, optimizer.optimizer)
    accelerator.print(f"{loss.item():.6f}")

state = {"denoiser": denoiser.state_dict(), "text_encoder": text_encoder.state_dict()}
accelerator.save(state, "models.pt")
