"""Qwen2.5-VL with a LoRA: pixel_values are the patches of all pictures of the batch, image_grid_thw says whose."""

import os
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_weight nan_loss late_nan"
PRELOAD = "transformers"
MODEL = "qwen2.5-vl"

warnings.filterwarnings("ignore")
torch.manual_seed(0)
folder = os.environ.get("LOOP_MODELS", "tiny")
model = AutoModelForImageTextToText.from_pretrained(f"{folder}/qwen2.5-vl")
config = model.config
vision = config.vision_config
patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
model = get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*q_proj", init_lora_weights=False))


def make_sample(i):
    grid = [1, 4, 4] if i % 2 == 0 else [1, 4, 8]
    num_patches = grid[1] * grid[2]
    picture = [config.vision_start_token_id] + [config.image_token_id] * (num_patches // 4)
    picture.append(config.vision_end_token_id)
    ids = torch.tensor(picture + list(range(20 + i, 30 + i)))
    ids = torch.cat([ids, torch.full((22 - len(ids),), 3)]) if len(ids) < 22 else ids
    return {"ids": ids, "pixels": torch.randn(num_patches, patch), "grid": grid}


def collate(rows):
    ids = torch.stack([row["ids"] for row in rows])
    labels = ids.clone()
    labels[labels == config.image_token_id] = -100
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "pixel_values": torch.cat([row["pixels"] for row in rows]),
        "image_grid_thw": torch.tensor([row["grid"] for row in rows]),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


data = plant.spoil_samples([make_sample(i) for i in range(16)])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

for batch in DataLoader(data, batch_size=2, collate_fn=collate):
    optimizer.zero_grad()
    loss = plant.spoil_loss(model(**batch).loss)
    loss.backward()
    plant.spoil_gradient(model)
    optimizer.step()
    plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.5f}")

torch.save({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, "adapter.pt")
