"""Components with a slower, safer fallback that can be switched off: attention backends, compilation, kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.compiler.config
from torch import nn
from torch.backends import cuda
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from dit_lora.errors import DitLoraError
from dit_lora.numerics.autocasts import disable_autocast
from dit_lora.numerics.dtensors import gather_shards_in_fp32
from dit_lora.numerics.finite import HALF_DTYPES

COMPILE = "compile"
CHECKPOINTING = "checkpointing"
OFFLOAD = "offload"


@dataclass(frozen=True)
class Fallback:
    """An optional component, such as a fused kernel, that can be replaced by slower, safer code.

    `disable_temporarily()` is a context manager; `disable()` lasts for the rest of the run.
    """

    name: str
    cause: Literal["kernel", "attention_backend"]
    """Cause that a diagnosis reports if this component is faulty."""
    disable_temporarily: Callable[[], AbstractContextManager[None]]
    disable: Callable[[], None]
    replacement: str
    """Description of the fallback that is used instead."""
    required: bool = False
    """True if the user requested it by name: if it is wrong from the start, that is an error, not a fallback."""
    parent: str | None = None
    """Name of the component that this one is a part of: disabled with it, and correct if the whole is correct."""
    rounding_error: float = 0.0
    """A limit on what rounding of its own changes, relative to what it computes. If any, it is compared with the other
    kernels on, and is off while they are compared."""


# PyTorch prefers these three in this order; the remaining backend, `math`, cannot be switched off.
_ATTENTION_BACKENDS: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
}


def list_attention_fallbacks() -> list[Fallback]:
    """Fallbacks for the enabled backends of `scaled_dot_product_attention`: one for each, then one for all."""
    # In PyTorch's order of preference.
    enabled = [name for name in _ATTENTION_BACKENDS if name in _list_enabled_backends()]
    sets: list[tuple[str, ...]] = [(name,) for name in enabled]
    if len(enabled) > 1:
        # If two backends are wrong, switching off one of them would let the other take the call.
        sets.append(tuple(enabled))
    return [_make_attention_fallback(names) for names in sets]


def enable_cudnn_unless_masked(*, masked: bool) -> None:
    """Enable cuDNN attention if there is a GPU and no mask: with a mask, its backward can give NaN.

    `masked` says whether the model's code may pass a mask (pytorch#196678, torch 2.11 and later).
    """
    cuda.enable_cudnn_sdp(torch.cuda.is_available() and not masked)


@contextmanager
def preserve_attention_backends() -> Iterator[None]:
    """Restore the enabled attention backends on exit."""
    backends_before, tag = _list_enabled_backends(), torch.compiler.config.cache_key_tag
    try:
        yield
    finally:
        _enable_only(backends_before, tag)


def _list_enabled_backends() -> set[str]:
    return {name for name, (is_on, _) in _ATTENTION_BACKENDS.items() if is_on()}


def _enable_only(backends: set[str], tag: str) -> None:
    """Enable only these attention backends, for compiled code too; `tag` distinguishes the setting in compile caches.

    The first call of compiled code fixes its attention backend, which is part of neither Dynamo's guards nor the key
    of autograd's cache on disk.
    """
    if backends == _list_enabled_backends():
        return
    for name, (_, enable) in _ATTENTION_BACKENDS.items():
        enable(name in backends)
    torch.compiler.config.cache_key_tag = tag
    torch.compiler.reset()


def list_compile_fallbacks(model: nn.Module) -> list[Fallback]:
    """Fallback for torch.compile if any part of the model is compiled, else an empty list."""
    wrapper = torch._dynamo.eval_frame.OptimizedModule
    if not any(m._compiled_call_impl is not None or isinstance(m, wrapper) for m in model.modules()):
        return []

    # A stance keeps compiled code, so that nothing is recompiled afterwards.
    disable_temporarily = partial(torch.compiler.set_stance, "force_eager")

    def disable() -> None:
        torch.compiler.set_stance("force_eager")

    return [Fallback(COMPILE, "kernel", disable_temporarily, disable, "eager mode")]


@contextmanager
def disable_compile(model: nn.Module) -> Iterator[None]:
    """Disable torch.compile inside the context, so that hooks and dispatch modes see every module and op."""
    with ExitStack() as stack:
        for fallback in list_model_fallbacks(model):
            if fallback.name == COMPILE:
                stack.enter_context(fallback.disable_temporarily())
        yield


_FALLBACKS_ATTRIBUTE = "_dit_lora_switches"


def set_model_fallbacks(model: nn.Module, fallbacks: Sequence[Fallback]) -> None:
    """Attach fallbacks to a model. They are stored on the object, outside its state dict."""
    model.__dict__.pop(_FALLBACKS_ATTRIBUTE, None)
    if fallbacks:
        model.__dict__[_FALLBACKS_ATTRIBUTE] = list(fallbacks)


def list_model_fallbacks(model: nn.Module) -> list[Fallback]:
    """Fallbacks set with `set_model_fallbacks`, and that of torch.compile if any part of the model is compiled."""
    return [*list_compile_fallbacks(model), *model.__dict__.get(_FALLBACKS_ATTRIBUTE, [])]


def list_fallbacks(model: nn.Module) -> list[Fallback]:
    """Fallbacks for every component that can be disabled when this model runs."""
    return [*list_attention_fallbacks(), *list_model_fallbacks(model)]


def find_fallback(fallbacks: list[Fallback], name: str) -> Fallback:
    """Find the fallback with this name.

    Raises:
        DitLoraError: If there is none; the message lists the known names.
    """
    for fallback in fallbacks:
        if fallback.name == name:
            return fallback
    names = ", ".join(fallback.name for fallback in fallbacks) or "none on this device"
    raise DitLoraError(f"no component is called {name!r}; components that can be switched off: {names}")


def _make_attention_fallback(names: tuple[str, ...]) -> Fallback:
    name = f"attention:{'+'.join(names)}"

    def disable() -> None:
        # The tag names every backend that is off, so that compile caches keep the settings apart.
        _enable_only(_list_enabled_backends().difference(names), f"{torch.compiler.config.cache_key_tag} no {name}")

    @contextmanager
    def disable_temporarily() -> Iterator[None]:
        with preserve_attention_backends():  # a backend that a diagnosis has turned off stays off
            disable()
            yield

    return Fallback(name, "attention_backend", disable_temporarily, disable, "PyTorch's next attention backend")


@contextmanager
def convert_to_fp32(model: nn.Module) -> Iterator[None]:
    """Convert the model's weights and computation to fp32 inside the context, without autocast; restored on exit.

    Needs memory for a second, fp32 copy of the weights. Collective for sharded weights, as each forward pass is.
    """
    with gather_shards_in_fp32(model, HALF_DTYPES), _convert_local_to_fp32(model):
        yield


@contextmanager
def _convert_local_to_fp32(model: nn.Module) -> Iterator[None]:
    all_tensors = [*model.parameters(), *model.buffers()]
    # Sharded weights are converted by the context around this one, which gathers them.
    tensors = [tensor for tensor in all_tensors if not isinstance(tensor, DTensor)]
    half_tensors = [(tensor, tensor.data, tensor.grad) for tensor in tensors if tensor.dtype in HALF_DTYPES]
    forward_before = model.__dict__.get("forward")
    # Accelerate stores the forward that it wraps in autocast under this name.
    unwrapped_forward = model.__dict__.get("_original_forward")
    # Bypass Accelerate's wrapper, which would enable autocast again.
    if unwrapped_forward is not None:
        model.__dict__["forward"] = unwrapped_forward
    device = all_tensors[0].device.type
    # bitsandbytes' 4-bit layers cast their input.
    half_layers: list[tuple[Any, torch.dtype]] = []
    for module in model.modules():
        compute_dtype = getattr(module, "compute_dtype", None)
        if compute_dtype in HALF_DTYPES:
            half_layers.append((module, compute_dtype))
    try:
        for layer, _ in half_layers:
            layer.compute_dtype = torch.float32
        for tensor, data, _ in half_tensors:
            # Clear the gradient first: its dtype must match that of the data.
            tensor.grad = None
            tensor.data = data.float()
        with disable_autocast(device), _convert_arguments_to_fp32(model), disable_compile(model):
            yield
    finally:
        for layer, compute_dtype in half_layers:
            layer.compute_dtype = compute_dtype
        # Exchange only the data: optimizers and hooks hold these parameter objects.
        for tensor, data, grad in half_tensors:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad
        if unwrapped_forward is not None:
            model.__dict__["forward"] = forward_before


@contextmanager
def _convert_arguments_to_fp32(model: nn.Module) -> Iterator[None]:
    def to_fp32(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
            return value.float()
        return value

    def hook(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return tree_map(to_fp32, (args, kwargs))  # a model may take lists of samples

    # Half-precision arguments would not match the weights, which are now fp32.
    with model.register_forward_pre_hook(hook, with_kwargs=True):
        yield
