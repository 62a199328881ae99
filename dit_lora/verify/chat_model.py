"""Loads chat models with Transformers and PEFT, as users do, to verify adapters: a fresh model, and one forward."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.adapters.peft_format import CHAT_ADAPTER_FILE
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.environment.safetensors_files import read_tensors
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.numerics.streams import make_generator
from dit_lora.verify.reference_model import InputSpec, ReferenceModel

_NUM_POSITIONS = 8  # number of last positions whose logits are compared


@dataclass(frozen=True)
class ChatReferenceModel(ReferenceModel):
    """The stock chat model of one checkpoint, for verifying a result in it."""

    checkpoint: ChatCheckpoint

    @property
    def name(self) -> str:
        return self.checkpoint.model_class.__name__

    def make_input_spec(self, clips: Any, *, full_size: bool) -> InputSpec:
        """Describe the input for comparing outputs: a question about one image of random pixels."""
        image_config = self.checkpoint.vision_settings
        return {"question": "What is shown?", "height": image_config.height, "width": image_config.width}

    def compute_output(self, model: nn.Module, input_spec: InputSpec, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """The chat model's logits (1, 8, vocabulary) at the prompt's last tokens."""
        device = next(model.parameters()).device
        shape = self.checkpoint.shape("image", input_spec["height"], input_spec["width"])
        assert shape is not None
        # A conversation with one turn and no answer: the prompt that generation would start from.
        about = Conversation("output", "image", None, (Turn(input_spec["question"], ""),))
        rendered = self.checkpoint.tokenize_conversation(about, shape, (0.0,), include_answer=False)
        # (B, F, C, H, W): one sample with one frame.
        size = (1, 1, 3, shape.height, shape.width)
        pixels = torch.randint(0, 256, size, generator=make_generator(seed, "output", "pixels"))
        batch = {"input_ids": torch.tensor([rendered.ids]), "pixels": pixels.to(torch.uint8)}
        # A Q-Former also gets the instruction separately.
        if rendered.instruction:
            batch["instruction_ids"] = torch.tensor([rendered.instruction])
            batch["instruction_mask"] = torch.ones_like(batch["instruction_ids"])
        inputs_of_model = self.checkpoint.build_model_inputs(
            {name: tensor.to(device) for name, tensor in batch.items()}
        )
        # Only the last positions: all logits of a long prompt would be large, and the last depend on all tokens.
        logits: torch.Tensor = model(**inputs_of_model).logits[:, -_NUM_POSITIONS:]
        return logits

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """Load the chat model with Transformers only: its forward is not wrapped."""
        model: nn.Module = load_pretrained(
            self.checkpoint.model_class, self.checkpoint.path, dtype=dtype, use_safetensors=True
        )
        return model.requires_grad_(False).eval()

    def load_adapter(self, model: nn.Module, file: Path) -> nn.Module:
        """Load a chat adapter and trained base weights with PEFT, as users do."""
        base, config = file.with_name(BASE_FILE), file.with_name("adapter_config.json")
        # Load base weights before PEFT wraps the layers and renames their weights.
        if base.is_file():
            # Not strict: the file only has the trained weights.
            _, unexpected = model.load_state_dict(read_tensors(base), strict=False)
            if unexpected:
                raise ValueError(f"the model has no {', '.join(unexpected)}")
        if config.is_file():
            read_peft_config(config)
            device = next(model.parameters()).device.type
            lazy = device == "meta"  # PEFT cannot read files to the meta device
            PeftModel.from_pretrained(
                model, file.parent, torch_device="cpu" if lazy else device, low_cpu_mem_usage=lazy
            )
        return model

    def read_adapter_tensors(self, file: Path) -> dict[str, torch.Tensor]:
        # The result may be base weights only, without an adapter's file.
        state = read_tensors(file.with_name(CHAT_ADAPTER_FILE), missing_ok=True)
        return {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}

    def list_weight_files(self) -> list[Path]:
        return sorted(self.checkpoint.path.glob("*.safetensors"))

    def compute_digest(self) -> str:
        path = self.checkpoint.path
        return make_entry_key({path.name: Digests(Path(os.devnull)).hash_component(path)})
