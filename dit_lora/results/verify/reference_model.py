"""Describes a checkpoint as its own library loads it, which a run and its result are compared with."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_lora.families.without_weights import as_constructed, from_configs
from dit_lora.numerics.dtensors import is_sharded
from dit_lora.numerics.quantized_linear import NarrowLinear

SEED = 1255
"""A seed whose draw for leaving out a first image (`data.image_dropout`) keeps it, at any share below 0.9999."""
Inputs = Mapping[str, Any]
"""The recipe of made-up inputs, as JSON."""


def sharing_weights(
    fresh: nn.Module, live: nn.Module, dtype: torch.dtype, *, trained: bool
) -> nn.Module:
    """Return the fresh model, made without values, holding the very tensors of a trained one; a second copy of none.

    Unless `trained`, what was trained of the base is zero, in `dtype`: it is to come from its file. Quantised layers
    are taken as they are.
    """
    named = dict(live.named_parameters(remove_duplicate=False)) | dict(live.named_buffers())
    for name, module in live.named_modules():
        # A quantised layer has no weight to hand over: the module itself moves.
        if isinstance(module, NarrowLinear):
            fresh.set_submodule(name.removesuffix(".base_layer"), module)
    wanted = {name.replace(".base_layer.", "."): tensor for name, tensor in named.items()}
    state = {}
    for name, own in fresh.state_dict(keep_vars=True).items():
        tensor = wanted[name]
        state[name] = tensor.detach()
        if tensor.requires_grad and own.is_meta and not trained:
            state[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    # `assign` takes the tensors themselves, where a copy would need a second base.
    fresh.load_state_dict(state, assign=True)
    for name, buffer in list(fresh.named_buffers()):
        # Buffers that no file holds, such as position tables: `load_state_dict` leaves those of the fresh model.
        if name not in state:
            parent, _, own_name = name.rpartition(".")
            fresh.get_submodule(parent)._buffers[own_name] = wanted.get(name, buffer)
    return fresh.requires_grad_(False).eval()


def why_apart(live: nn.Module) -> str | None:
    """Return why a fresh model cannot compute with this one's weights; None if it can."""
    if is_sharded(live):
        return "the run's weights are spread over ranks"
    if len({parameter.device.type for parameter in live.parameters()}) > 1:
        return "the run's weights are in several places (train.offload)"
    return None


def tuner_layers(model: nn.Module) -> list[BaseTunerLayer]:
    """Return the layers with an adapter."""
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


class ReferenceModel(ABC):
    """One checkpoint as its own library loads it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of what loads it, for messages."""

    @abstractmethod
    def inputs(self, clips: Any, *, whole: bool) -> Inputs:
        """Return what made-up inputs are drawn by, for a model trained on these; `whole` keeps height and width."""

    def has_all_inputs(self, inputs: Inputs) -> bool:
        """Return False for inputs of an earlier version, which do not record the noise level of the output."""
        return True

    @abstractmethod
    def output(
        self, model: nn.Module, inputs: Inputs, seed: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the model's output of made-up inputs; `dtype` is what it computes in."""

    @abstractmethod
    def load(self, dtype: torch.dtype) -> nn.Module:
        """Return a fresh model with the checkpoint's weights, on the CPU."""

    def without_values(self, dtype: torch.dtype) -> nn.Module:
        """Return a fresh model on the meta device; its buffers are whole."""
        with init_empty_weights(), from_configs():
            model = self.load(dtype)
        return as_constructed(model)

    @abstractmethod
    def put(self, model: nn.Module, file: Path) -> nn.Module:
        """Load an adapter and what was trained beside it, as users of that library do; return the model with it."""

    @abstractmethod
    def stored(self, file: Path) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by the names that a loaded one has."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """Return the safetensors files of the model."""

    @abstractmethod
    def digest(self) -> str:
        """Return the digest of the model's files, as a run's header has it (`transformer_digest`); all are read."""
