"""Switches of what may be the cause: attention backends, compilation, fused kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
import torch.compiler.config
from torch import nn
from torch.backends import cuda
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from dit_lora.errors import DitLoraError
from dit_lora.numerics.autocasts import held_off
from dit_lora.numerics.dtensors import gathered_in_fp32
from dit_lora.numerics.finite import HALVES

COMPILE = "compile"


@dataclass(frozen=True)
class Switch:
    """Something that has a slower, safer way: `off()` for a while, `turn_off()` for the rest of the run."""

    name: str
    cause: Literal["kernel", "attention_backend"]
    """The cause that a verdict names."""
    off: Callable[[], AbstractContextManager[None]]
    turn_off: Callable[[], None]
    remedy: str
    """The way that is used instead, in words."""
    insisted: bool = False
    """Asked for by name: where it is wrong from the start, that is an error and no reason to fall back."""
    part_of: str | None = None
    """The switch that this is a part of: off with it, and right if all of it is."""
    error: float = 0.0
    """A limit on what rounding of its own changes, relative to what it computes. If any, it is compared with the other
    kernels on, and is off while they are compared."""


# PyTorch asks these three in this order of preference; what is left is `math`, which cannot be switched off.
_ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
}


def attention_switches() -> list[Switch]:
    """Return the backends of `scaled_dot_product_attention` that are on, each and then all together."""
    enabled = [name for name in _ATTENTION if name in _on()]
    sets: list[tuple[str, ...]] = [(name,) for name in enabled]
    if len(enabled) > 1:
        # Where two are wrong, switching one off leaves the call to the other.
        sets.append(tuple(enabled))
    return [_attention(names) for names in sets]


def choose_cudnn(*, masked: bool) -> None:
    """Let PyTorch attend by cuDNN if there is a GPU and no mask: with one, its backward can give NaN.

    `masked` says whether the model's own code may give a mask (pytorch#196678, torch 2.11 and later).
    """
    cuda.enable_cudnn_sdp(torch.cuda.is_available() and not masked)


@contextmanager
def kept_attention() -> Iterator[None]:
    """Leave the same backends on afterwards as before."""
    before, tag = _on(), torch.compiler.config.cache_key_tag
    try:
        yield
    finally:
        _leave_on(before, tag)


def _on() -> set[str]:
    return {name for name, (is_on, _) in _ATTENTION.items() if is_on()}


def _leave_on(backends: set[str], tag: str) -> None:
    """Switch on these backends and no others, also in code that is compiled; `tag` tells it apart in caches.

    The first call of compiled code chooses its attention's backend, which neither Dynamo's guards nor the key of
    autograd's cache on disk look at.
    """
    if backends == _on():
        return
    for name, (_, enable) in _ATTENTION.items():
        enable(name in backends)
    torch.compiler.config.cache_key_tag = tag
    torch.compiler.reset()


def compile_switches(model: nn.Module) -> list[Switch]:
    """Return torch.compile's switch, if any part of the model is compiled."""
    if not any(_is_compiled(module) for module in model.modules()):
        return []

    # A stance forgets no compiled code: afterwards nothing is compiled anew.
    off = partial(torch.compiler.set_stance, "force_eager")

    def turn_off() -> None:
        torch.compiler.set_stance("force_eager")

    return [Switch(COMPILE, "kernel", off, turn_off, "eager mode")]


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run nothing of the model compiled within, so that hooks and modes see all of its parts and ops."""
    with ExitStack() as stack:
        for switch in model_switches(model):
            if switch.name == COMPILE:
                stack.enter_context(switch.off())
        yield


_OF_MODEL = "_dit_lora_switches"


def set_model_switches(model: nn.Module, switches: Sequence[Switch]) -> None:
    """Note what was put into this model and can be switched off; kept beside its modules, saved nowhere."""
    model.__dict__.pop(_OF_MODEL, None)
    if switches:
        model.__dict__[_OF_MODEL] = list(switches)


def model_switches(model: nn.Module) -> list[Switch]:
    """Return what `set_model_switches` was given for the model, and torch.compile if any part is compiled."""
    return [*compile_switches(model), *model.__dict__.get(_OF_MODEL, [])]


def all_switches(model: nn.Module) -> list[Switch]:
    """Return everything that can be switched off where this model runs."""
    return [*attention_switches(), *model_switches(model)]


def find_switch(switches: list[Switch], name: str) -> Switch:
    """Return the switch of this name; raises `DitLoraError` listing those that there are."""
    for switch in switches:
        if switch.name == name:
            return switch
    names = ", ".join(switch.name for switch in switches) or "none on this device"
    raise DitLoraError(f"nothing is called {name!r} that could be switched off; known: {names}")


def _attention(names: tuple[str, ...]) -> Switch:
    switch = f"attention:{'+'.join(names)}"

    def turn_off() -> None:
        _leave_on(_on().difference(names), f"{torch.compiler.config.cache_key_tag} no {switch}")

    @contextmanager
    def off() -> Iterator[None]:
        with kept_attention():  # what a verdict turned off for good stays off
            turn_off()
            yield

    return Switch(
        switch,
        "attention_backend",
        off,
        turn_off,
        "PyTorch's next attention backend",
    )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(
        module, torch._dynamo.eval_frame.OptimizedModule
    )


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Hold weights and compute of the model in fp32, autocast off, within; afterwards the same tensors as before.

    Needs memory for a second, fp32 copy of the weights. Collective where they are sharded, as each forward pass is.
    """
    with gathered_in_fp32(model, HALVES), _held_in_fp32(model):
        yield


@contextmanager
def _held_in_fp32(model: nn.Module) -> Iterator[None]:
    every_tensor = [*model.parameters(), *model.buffers()]
    tensors = [tensor for tensor in every_tensor if not isinstance(tensor, DTensor)]
    narrow = [(tensor, tensor.data, tensor.grad) for tensor in tensors if tensor.dtype in HALVES]
    wrapped = model.__dict__.get("forward")
    # Accelerate keeps there what it wraps in autocast.
    bare = model.__dict__.get("_original_forward")
    # Accelerate's wrapper would open autocast again, inside.
    if bare is not None:
        model.__dict__["forward"] = bare
    device = every_tensor[0].device.type
    # bitsandbytes' 4-bit layers cast their input.
    fixed = [(m, m.compute_dtype) for m in model.modules() if _computes_in_half(m)]
    try:
        for module, _ in fixed:
            module.compute_dtype = torch.float32
        for tensor, data, _ in narrow:
            # Gradients go first: they have the dtype that the data will no longer have.
            tensor.grad = None
            tensor.data = data.float()
        with held_off(device), _fp32_arguments(model), eager(model):
            yield
    finally:
        for module, dtype in fixed:
            module.compute_dtype = dtype
        for tensor, data, grad in narrow:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad
        if bare is not None:
            model.__dict__["forward"] = wrapped


def _computes_in_half(module: nn.Module) -> TypeGuard[Any]:
    return getattr(module, "compute_dtype", None) in HALVES


@contextmanager
def _fp32_arguments(model: nn.Module) -> Iterator[None]:
    def widen(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.dtype in HALVES:
            return value.float()
        return value

    def hook(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return tree_map(widen, (args, kwargs))  # a model may take lists of samples

    # Arguments in half precision would not fit the weights that are now in fp32.
    with model.register_forward_pre_hook(hook, with_kwargs=True):
        yield
