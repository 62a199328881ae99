"""TRL's SFTTrainer with a LoRA on a tiny Llama, on data that is tokenized already."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.loops import plant

FAULTS = "inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
PRELOAD = "trl"
VARIES = "*training_args.bin *README.md"


class OwnTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return plant.spoil_loss(result[0]), result[1]
        return plant.spoil_loss(result)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        plant.spoil_gradient(model)
        return loss


class AfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        plant.spoil_between_steps(model, getattr(optimizer, "optimizer", optimizer))


vocabulary = [*"abcdefghijklmnop", "<pad>", "<eos>"]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=16,
)
rows = [[(3 * i + 5 * j) % 16 for j in range(4 + i % 5)] for i in range(16)]
arguments = SFTConfig(
    "out",
    per_device_train_batch_size=4,
    max_steps=6,
    learning_rate=1e-2,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    max_length=16,
)
trainer = OwnTrainer(
    LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    callbacks=[AfterStep()],
)
trainer.train()
trainer.save_model("final")
