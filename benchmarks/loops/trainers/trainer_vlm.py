"""Qwen2.5-VL with a LoRA in transformers.Trainer: pixel_values are the patches of all pictures of the batch."""

import os
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient late_nan"
GUARDS = "command callback"
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
    picture = [config.vision_start_token_id] + [config.image_token_id] * 4
    ids = torch.tensor([*picture, config.vision_end_token_id, *range(20 + i, 26 + i)])
    return {"input_ids": ids, "pixel_values": torch.randn(16, patch)}


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.where(ids == config.image_token_id, -100, ids),
        "pixel_values": torch.cat([row["pixel_values"] for row in rows]),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(rows)),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


class OwnTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        plant.spoil_gradient(model)
        return loss


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=8,
    learning_rate=1e-3,
    save_strategy="no",
    remove_unused_columns=False,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
data = plant.spoil_samples([make_sample(i) for i in range(16)])
trainer = OwnTrainer(model, arguments, train_dataset=data, data_collator=collate)
if "--guard=callback" in sys.argv:
    import dit_lora

    trainer.add_callback(dit_lora.GuardCallback(trainer))
trainer.train()
torch.save({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, "adapter.pt")
