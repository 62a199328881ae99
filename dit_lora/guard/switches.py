"""Switches for possible causes of a failure: attention backends, compilation, fused kernels."""

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
    """A component with a slower, safer fallback: `off()` for a while, `turn_off()` for the rest of the run."""

    name: str
    cause: Literal["kernel", "attention_backend"]
    """The cause that a verdict reports."""
    off: Callable[[], AbstractContextManager[None]]
    turn_off: Callable[[], None]
    remedy: str
    """Description of the fallback that is used instead."""
    insisted: bool = False
    """True if the user requested it by name: if it is wrong from the start, that is an error, not a fallback."""
    part_of: str | None = None
    """The switch that this is a part of: it is off with it, and correct if the whole is correct."""
    error: float = 0.0
    """A limit on what rounding of its own changes, relative to what it computes. If any, it is compared with the other
    kernels on, and is off while they are compared."""


# PyTorch prefers these three in this order; the remaining backend, `math`, cannot be switched off.
_ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
}


def attention_switches() -> list[Switch]:
    """Switches for the enabled backends of `scaled_dot_product_attention`: each, then all together."""
    # In PyTorch's order of preference.
    enabled = [name for name in _ATTENTION if name in _on()]
    sets: list[tuple[str, ...]] = [(name,) for name in enabled]
    if len(enabled) > 1:
        # If two backends are wrong, switching off one of them would let the other take the call.
        sets.append(tuple(enabled))
    return [_attention(names) for names in sets]


def choose_cudnn(*, masked: bool) -> None:
    """Enable cuDNN attention if there is a GPU and no mask: with a mask, its backward can give NaN.

    `masked` says whether the model's code may pass a mask (pytorch#196678, torch 2.11 and later).
    """
    cuda.enable_cudnn_sdp(torch.cuda.is_available() and not masked)


@contextmanager
def kept_attention() -> Iterator[None]:
    """Restore the enabled attention backends on exit."""
    backends_before, tag = _on(), torch.compiler.config.cache_key_tag
    try:
        yield
    finally:
        _leave_on(backends_before, tag)


def _on() -> set[str]:
    return {name for name, (is_on, _) in _ATTENTION.items() if is_on()}


def _leave_on(backends: set[str], tag: str) -> None:
    """Enable only these backends, for compiled code too; `tag` distinguishes the setting in compile caches.

    The first call of compiled code fixes its attention backend, which is part of neither Dynamo's guards nor the key
    of autograd's cache on disk.
    """
    if backends == _on():
        return
    for name, (_, enable) in _ATTENTION.items():
        enable(name in backends)
    torch.compiler.config.cache_key_tag = tag
    torch.compiler.reset()


def compile_switches(model: nn.Module) -> list[Switch]:
    """A switch for torch.compile if any part of the model is compiled, else an empty list."""
    if not any(_is_compiled(module) for module in model.modules()):
        return []

    # A stance keeps compiled code, so that nothing is recompiled afterwards.
    disable_temporarily = partial(torch.compiler.set_stance, "force_eager")

    def turn_off() -> None:
        torch.compiler.set_stance("force_eager")

    return [Switch(COMPILE, "kernel", disable_temporarily, turn_off, "eager mode")]


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Disable torch.compile inside the context, so that hooks and dispatch modes see every module and op."""
    with ExitStack() as stack:
        for fallback in model_switches(model):
            if fallback.name == COMPILE:
                stack.enter_context(fallback.off())
        yield


_OF_MODEL = "_dit_lora_switches"


def set_model_switches(model: nn.Module, switches: Sequence[Switch]) -> None:
    """Attach switches to a model. They are stored on the object, outside its state dict."""
    model.__dict__.pop(_OF_MODEL, None)
    if switches:
        model.__dict__[_OF_MODEL] = list(switches)


def model_switches(model: nn.Module) -> list[Switch]:
    """The switches set with `set_model_switches`, and torch.compile's if any part is compiled."""
    return [*compile_switches(model), *model.__dict__.get(_OF_MODEL, [])]


def all_switches(model: nn.Module) -> list[Switch]:
    """Every component that can be switched off when this model runs."""
    return [*attention_switches(), *model_switches(model)]


def find_switch(switches: list[Switch], name: str) -> Switch:
    """The switch with this name.

    Raises:
        DitLoraError: If there is none; the message lists the known names.
    """
    for fallback in switches:
        if fallback.name == name:
            return fallback
    names = ", ".join(fallback.name for fallback in switches) or "none on this device"
    raise DitLoraError(f"nothing is called {name!r} that could be switched off; known: {names}")


def _attention(names: tuple[str, ...]) -> Switch:
    name = f"attention:{'+'.join(names)}"

    def turn_off() -> None:
        # The tag names every backend that is off, so that compile caches keep the settings apart.
        _leave_on(_on().difference(names), f"{torch.compiler.config.cache_key_tag} no {name}")

    @contextmanager
    def off() -> Iterator[None]:
        with kept_attention():  # a backend that a diagnosis has turned off stays off
            turn_off()
            yield

    return Switch(
        name,
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
    """Convert the model's weights and computation to fp32 inside the context, without autocast; restored on exit.

    Needs memory for a second, fp32 copy of the weights. Collective for sharded weights, as each forward pass is.
    """
    with gathered_in_fp32(model, HALVES), _held_in_fp32(model):
        yield


@contextmanager
def _held_in_fp32(model: nn.Module) -> Iterator[None]:
    all_tensors = [*model.parameters(), *model.buffers()]
    # Sharded weights are converted by the context around this one, which gathers them.
    tensors = [tensor for tensor in all_tensors if not isinstance(tensor, DTensor)]
    half_tensors = [
        (tensor, tensor.data, tensor.grad) for tensor in tensors if tensor.dtype in HALVES
    ]
    forward_before = model.__dict__.get("forward")
    # Accelerate stores the forward that it wraps in autocast under this name.
    unwrapped_forward = model.__dict__.get("_original_forward")
    # Bypass Accelerate's wrapper, which would enable autocast again.
    if unwrapped_forward is not None:
        model.__dict__["forward"] = unwrapped_forward
    device = all_tensors[0].device.type
    # bitsandbytes' 4-bit layers cast their input.
    half_layers = [(m, m.compute_dtype) for m in model.modules() if _computes_in_half(m)]
    try:
        for module, _ in half_layers:
            module.compute_dtype = torch.float32
        for tensor, data, _ in half_tensors:
            # Clear the gradient first: its dtype must match that of the data.
            tensor.grad = None
            tensor.data = data.float()
        with held_off(device), _fp32_arguments(model), eager(model):
            yield
    finally:
        for module, dtype in half_layers:
            module.compute_dtype = dtype
        # Exchange only the data: optimizers and hooks hold these parameter objects.
        for tensor, data, grad in half_tensors:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad
        if unwrapped_forward is not None:
            model.__dict__["forward"] = forward_before


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

    # Half-precision arguments would not match the weights, which are now fp32.
    with model.register_forward_pre_hook(hook, with_kwargs=True):
        yield
