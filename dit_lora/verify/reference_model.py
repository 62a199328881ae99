"""Base class for a checkpoint loaded with its own library, which a run and its result are compared with."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from dit_lora.families.without_weights import build_from_configs, reenable_device_moves
from dit_lora.numerics.dtensors import is_sharded
from dit_lora.numerics.quantized_linear import QuantizedLinear

SEED = 1255
"""With this seed, `data.image_dropout` keeps the first image at any rate below 0.9999."""
InputSpec = Mapping[str, Any]
"""How to draw the random inputs, as JSON."""


def share_model_weights(
    new_model: nn.Module, trained_model: nn.Module, dtype: torch.dtype, *, share_trained: bool
) -> nn.Module:
    """Let a fresh model, built without values, share the tensors of a trained model, without a copy.

    Args:
        new_model: The model on the meta device.
        trained_model: The trained model.
        dtype: Dtype of the zeros for trained base weights.
        share_trained: Share the trained base weights too. False: they are zero, to be loaded from their file.
    """
    # With duplicates: tied weights must be found under each of their names.
    named = dict(trained_model.named_parameters(remove_duplicate=False)) | dict(trained_model.named_buffers())
    for name, module in trained_model.named_modules():
        # A quantized layer has no plain weight to share: use the module itself.
        if isinstance(module, QuantizedLinear):
            new_model.set_submodule(name.removesuffix(".base_layer"), module)
    # PEFT has wrapped the trained model's layers, the fresh model has none of its wrappers yet.
    live_tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in named.items()}
    state = {}
    for name, fresh_tensor in new_model.state_dict(keep_vars=True).items():
        tensor = live_tensors[name]
        state[name] = tensor.detach()
        # Trained base weights come from the saved file, so that the file itself is verified.
        if tensor.requires_grad and fresh_tensor.is_meta and not share_trained:
            state[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    # `assign` shares the tensors; copies would need the memory of a second base.
    new_model.load_state_dict(state, assign=True)
    for name, buffer in list(new_model.named_buffers()):
        # Buffers that no file holds, such as position tables: `load_state_dict` leaves those of the fresh model.
        if name not in state:
            parent, _, attribute = name.rpartition(".")
            new_model.get_submodule(parent)._buffers[attribute] = live_tensors.get(name, buffer)
    return new_model.requires_grad_(False).eval()


def find_sharing_obstacle(trained_model: nn.Module) -> str | None:
    """Reason why a fresh model cannot share this model's weights; None if it can."""
    if is_sharded(trained_model):
        return "the run's weights are spread over ranks"
    if len({parameter.device.type for parameter in trained_model.parameters()}) > 1:
        return "the run's weights are in several places (train.offload)"
    return None


class ReferenceModel(ABC):
    """Base class for a checkpoint as its library (Diffusers or Transformers) loads it, without this package's code."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the class that loads a result, for messages."""

    @abstractmethod
    def make_input_spec(self, clips: Any, *, full_size: bool) -> InputSpec:
        """Describe random inputs for a model trained on these clips. `full_size` keeps height and width."""

    def has_all_inputs(self, input_spec: InputSpec) -> bool:
        """False if recorded inputs cannot be reproduced: those of earlier versions lack the noise level."""
        return True

    @abstractmethod
    def compute_output(self, model: nn.Module, input_spec: InputSpec, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """The model's output for random inputs. `dtype` is the one that it computes in."""

    @abstractmethod
    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """Load a fresh model with the checkpoint's weights, on the CPU."""

    def load_meta_model(self, dtype: torch.dtype) -> nn.Module:
        """Build a fresh model on the meta device; its buffers have values."""
        # Parameters are created on meta, and no weight file is read.
        with init_empty_weights(), build_from_configs():
            model = self.load_model(dtype)
        return reenable_device_moves(model)

    @abstractmethod
    def load_adapter(self, model: nn.Module, file: Path) -> nn.Module:
        """Load an adapter and its trained base weights as users of the library do. Returns the model with them."""

    @abstractmethod
    def read_adapter_tensors(self, file: Path) -> dict[str, torch.Tensor]:
        """The adapter's tensors in the file, with the names that they have once loaded."""

    @abstractmethod
    def list_weight_files(self) -> list[Path]:
        """The safetensors files of the model."""

    @abstractmethod
    def compute_digest(self) -> str:
        """Digest of the model's files, as in a run's header (`transformer_digest`). Reads all files."""
