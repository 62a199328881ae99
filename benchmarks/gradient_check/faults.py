"""Faults of a backward pass whose loss is right and whose gradients are finite but wrong."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from benchmarks.gradient_check.tiny_training import MICRO_BATCHES, TinyTraining
from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import OPS, fuse, unfuse
from dit_lora.numerics.adapter_tensors import get_layer_name

Passes = Callable[[TinyTraining], AbstractContextManager[None]]
"""Context in which forward and backward passes have the fault; the loss is right."""
Plant = Callable[[TinyTraining], None]
"""Computes a step's gradient with the fault in it."""


@dataclass(frozen=True)
class GradientFault:
    """A fault, and how a step with it is computed."""

    name: str
    passes: Passes = lambda _training: nullcontext()
    compute: Plant = TinyTraining.run_backward
    dropout: float = 0.0
    is_race: bool = False
    """True if replays of the step do not have the fault in their passes."""

    @property
    def is_in_replays(self) -> bool:
        """True if replays of the step have the whole fault."""
        return self.compute is TinyTraining.run_backward and not self.is_race

    def plant(self, training: TinyTraining) -> None:
        with self.passes(training):
            self.compute(training)

    def replay(self, training: TinyTraining) -> AbstractContextManager[None]:
        """Context of a check: replays have the fault of forward and backward passes, unless it is a race."""
        return nullcontext() if self.is_race else self.passes(training)


def find_blocks(training: TinyTraining) -> list[nn.Module]:
    """The transformer blocks of the model's last list of equal blocks."""
    lists = [m for m in training.model.children() if isinstance(m, nn.ModuleList) and len(m) > 1]
    return list(lists[-1])


def _find_layer(training: TinyTraining, endings: tuple[str, ...]) -> nn.Module:
    """The last layer in the blocks whose name has one of these endings."""
    layers = [m for block in find_blocks(training) for n, m in block.named_modules() if n.endswith(endings)]
    return layers[-1]


def _change_at_backward(make_changes: Callable[[TinyTraining], dict[torch.Tensor, torch.Tensor]]) -> Passes:
    """Other values in frozen weights during backward passes, which autograd does not notice, as of a block in copy."""

    @contextmanager
    def change(training: TinyTraining) -> Iterator[None]:
        def change_weights() -> None:
            changes = make_changes(training)
            originals = {weight: weight.detach().clone() for weight in changes}
            for weight, values in changes.items():
                weight.data.copy_(values)

            def restore() -> None:
                for weight, values in originals.items():
                    weight.data.copy_(values)

            torch.autograd.Variable._execution_engine.queue_callback(restore)  # type: ignore[attr-defined]

        training.before_backward = change_weights
        try:
            yield
        finally:
            training.before_backward = None

    return change


def _frozen_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in module.named_parameters() if not p.requires_grad and p.ndim == 2}


def use_other_block(training: TinyTraining) -> dict[torch.Tensor, torch.Tensor]:
    *_, previous_block, block = find_blocks(training)
    previous_weights = _frozen_weights(previous_block)
    return {
        weight: previous_weights[name].clone()
        for name, weight in _frozen_weights(block).items()
        if name in previous_weights and previous_weights[name].shape == weight.shape
    }


def use_stale_weights(training: TinyTraining) -> dict[torch.Tensor, torch.Tensor]:
    """Every weight as it was in another run: 10 % away."""
    weights = _frozen_weights(training.model).values()
    generator = torch.Generator().manual_seed(0)
    return {p: p * (1 + 0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype) for p in weights}


def copy_half(training: TinyTraining) -> dict[torch.Tensor, torch.Tensor]:
    weight = next(iter(_frozen_weights(_find_layer(training, ("to_out.0", "to_v", "to_value"))).values()))
    half = weight.detach().clone()
    half[len(half) // 2 :] = 0
    return {weight: half}


def _detach_input(endings: tuple[str, ...]) -> Passes:
    def detach(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)

    @contextmanager
    def install(training: TinyTraining) -> Iterator[None]:
        with _find_layer(training, endings).register_forward_pre_hook(detach):
            yield

    return install


def _scale_backward(factor: float) -> Passes:
    """An op whose backward is off by a factor: the attention's output projection."""

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        # The same value; its gradient is multiplied.
        return output.detach() + factor * (output - output.detach())

    @contextmanager
    def install(training: TinyTraining) -> Iterator[None]:
        with _find_layer(training, ("to_out.0", "to_v", "to_value")).register_forward_hook(hook):
            yield

    return install


FUSED_FUNCTIONS = {
    "lora_linear": "lora_qkv_unchecked",
    "qk_norm_rope": "qk_norm_rope",
    "ada_norm": "joint_ada_norm",
    "relu_linear_attention": "relu_linear_attention",
    "silu_dwconv_glu": "silu_dwconv_glu",
}
"""By fused op, the function of `dit_lora_kernels` that fused models call."""


def _scale_fused_backward(op: str, factor: float) -> Passes:
    """A fused op, run by its reference in PyTorch, whose backward is off by a factor; nothing in models without it."""

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() + factor * (tensor - tensor.detach()) if tensor.requires_grad else tensor

    def scale_outputs(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return tree_map_only(torch.Tensor, scale, function(*args, **options))

    @contextmanager
    def install(training: TinyTraining) -> Iterator[None]:
        try:
            fuse(training.model, cast(Any, {**dict.fromkeys(OPS, "off"), op: "on"}), check=False)
        # The model has no such op.
        except DitLoraError:
            yield
            return
        with ExitStack() as stack:
            stack.callback(unfuse, training.model)
            # The models' modules have imported it by name.
            for module in [m for name, m in sys.modules.items() if name.startswith("dit_lora.fuse.")]:
                function = getattr(module, FUSED_FUNCTIONS[op], None)
                if isfunction(function):
                    stack.callback(setattr, module, FUSED_FUNCTIONS[op], function)
                    setattr(module, FUSED_FUNCTIONS[op], partial(scale_outputs, function))
            yield

    return install


def _scale(factor: float) -> Plant:
    return partial(TinyTraining.run_backward, weights=(factor / MICRO_BATCHES,) * MICRO_BATCHES)


def lose_gradient(training: TinyTraining) -> None:
    training.run_backward()
    layers = [get_layer_name(name) for name in training.parameters]
    for name, parameter in training.parameters.items():
        if get_layer_name(name) == layers[len(layers) // 2]:
            parameter.grad = None


@contextmanager
def recompute_with_other_dropout(training: TinyTraining) -> Iterator[None]:
    with ExitStack() as stack:
        for block in find_blocks(training):
            stack.callback(setattr, block, "forward", block.forward)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield


def use_previous_batch(training: TinyTraining) -> None:
    training.step -= 1
    training.run_backward()
    training.step += 1


FAULTS = (
    GradientFault("another block's weights at the backward", _change_at_backward(use_other_block)),
    GradientFault("all weights 10 % off at the backward", _change_at_backward(use_stale_weights)),
    GradientFault("half of a layer not copied at the backward", _change_at_backward(copy_half), is_race=True),
    GradientFault(
        "FFN input detached", _detach_input(("ff", "ffn", "feed_forward", "img_mlp", "proj_mlp", "linear_fc2"))
    ),
    GradientFault(
        "one V projection's input detached", _detach_input(("attn1.to_v", "attn.to_v", "attention.to_v", "to_value"))
    ),
    GradientFault("one LoRA without a gradient", compute=lose_gradient),
    GradientFault("recomputed with other dropout masks", recompute_with_other_dropout, dropout=0.3),
    GradientFault("gradient halved", compute=_scale(0.5)),
    GradientFault("not divided by the micro-batches", compute=_scale(MICRO_BATCHES)),
    GradientFault(
        "one rank's gradient without all-reduce", compute=partial(TinyTraining.run_backward, weights=(1.0, 0.0))
    ),
    GradientFault("gradient of the step before", compute=use_previous_batch),
    GradientFault("last micro-batch weighted twice", compute=partial(TinyTraining.run_backward, weights=(0.5, 1.0))),
    GradientFault("an op's backward 3 % too large", _scale_backward(1.03)),
    *(GradientFault(f"{op}'s backward 3 % too large", _scale_fused_backward(op, 1.03)) for op in FUSED_FUNCTIONS),
)
