"""One training step on fake tensors: its peak, as the allocator would see it, without taking any memory.

A step of a GPU is counted on fake CPU tensors with what differs there put in: CUDA's autocast keeps other ops in
fp32 than the CPU's, and its RMSNorm is one op.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from dit_lora.data.cache import Spec
from dit_lora.families.base import Tensors
from dit_lora.training.budget_live import Live, Work
from dit_lora.training.checkpointing import (
    Mode,
    block_caller,
    call_blocks_by,
    supports_checkpointing,
)

CPU = torch.device("cpu")
_HALF = (torch.bfloat16, torch.float16)
# torch/include/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE: what CUDA's autocast computes
# in fp32 and the CPU's does not, by the names that Python calls it by.
_FP32 = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "__pow__",
        "__rpow__",
        "softplus",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "cosine_similarity",
        "nll_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "cdist",
        "renorm",
        "logsumexp",
        "cross_entropy",
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "norm",
        "sum",
    ]
)


class _RMSNorm(torch.autograd.Function):
    """What CUDA's one op for it saves: input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[: x.dim() - dims]), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class CudaAutocast(TorchFunctionMode):
    """Within it, the CPU's autocast casts what CUDA's would; for counting alone, as RMSNorm gives no values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cpu") and name in _FP32:
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
            if name == "rms_norm":
                return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in _HALF
    return value.float() if is_half else value


def _rms_norm(
    input: torch.Tensor,  # F.rms_norm's names
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _RMSNorm.apply(input, weight, len(normalized_shape))


@contextmanager
def autocasting(model: nn.Module, dtype: torch.dtype, *, gpu: bool) -> Iterator[None]:
    """Within it, `model` computes under autocast as Accelerate prepares it; of fp32 nothing changes."""
    if dtype is torch.float32:
        yield
        return
    own = model.__dict__.get("forward")  # such as that which gives answers' losses
    forward: Any = model.forward

    def under(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return forward(*args, **kwargs)

    set_forward: Any = setattr
    set_forward(model, "forward", convert_outputs_to_fp32(under))
    try:
        with CudaAutocast() if gpu else ExitStack():
            yield
    finally:
        del model.forward
        if own is not None:
            set_forward(model, "forward", own)


class StepPeak(NamedTuple):
    """Of one micro-step; bytes on the device beside weights, optimizer and batch."""

    most: int
    """At the peak: activations, and gradients as far as they exist then."""
    after_forward: int
    """Activations that wait for the backward pass."""
    forward: Work
    whole: Work


class _Whole(nn.Module):
    """Forward and backward in one call: what a block recomputes needs the weights that were put in."""

    def __init__(
        self, transformer: nn.Module, losses: Callable[..., Any], seen: Callable[[], None]
    ) -> None:
        super().__init__()
        self.transformer, self.losses, self.seen = transformer, losses, seen

    def forward(self, batch: Tensors) -> None:
        loss = self.losses(self.transformer, batch).losses.mean()
        self.seen()
        loss.backward()


def step_peak(
    transformer: nn.Module,
    losses: Callable[[nn.Module, Tensors], Any],
    batch: Spec,
    mode: Mode,
    *,
    known: Mapping[str, torch.Tensor] | None = None,
    gradients_exist: bool = False,
) -> StepPeak:
    """Forward and backward under a checkpointing mode, on fake weights; afterwards checkpointing is off.

    `gradients_exist`: of earlier micro-steps, and so counted elsewhere. Raises as `memory.measure`.
    """
    marks: list[tuple[int, Work]] = []

    def seen() -> None:
        marks.append((live.now, Work(**vars(live.work))))

    step = _Whole(transformer, losses, seen)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    weights, tensors = fake_state(step, fake), fake_batch(batch, fake, known)
    if gradients_exist:
        for weight in weights.values():
            if weight.requires_grad:
                weight.grad = torch.empty_like(weight)
    existing = [weight.grad for weight in weights.values() if weight.grad is not None]
    if supports_checkpointing(transformer):
        call_blocks_by(transformer, _within_autocast(block_caller(mode)))
    try:
        with Live([*weights.values(), *tensors.values(), *existing]) as live:
            functional_call(step, weights, (tensors,))
    finally:
        if supports_checkpointing(transformer):
            call_blocks_by(transformer, None)
    (after_forward, forward), *_ = marks
    return StepPeak(live.most, after_forward, forward, live.work)


def _within_autocast(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Function modes are off in the backward pass, where a block that is computed again needs `CudaAutocast` too."""
    if call is None or not _emulated():
        return call

    def run(block: Callable[..., Any], *args: Any) -> Any:
        def under(*inputs: Any) -> Any:
            with CudaAutocast():
                return block(*inputs)

        return call(under, *args)

    return run


def _emulated() -> bool:
    return any(isinstance(mode, CudaAutocast) for mode in _get_current_function_mode_stack())


def fake_state(module: nn.Module, fake: FakeTensorMode) -> Tensors:
    """Its parameters and buffers by name, without values, on a CPU."""
    with fake:
        return {
            name: torch.empty_like(t, device=CPU).requires_grad_(t.requires_grad)
            for name, t in [*module.named_parameters(), *module.named_buffers()]
        }


def fake_batch(
    batch: Spec, fake: FakeTensorMode, known: Mapping[str, torch.Tensor] | None = None
) -> Tensors:
    """Floats without values; integers, on which shapes may depend, are ones unless `known`."""
    with fake:
        floats = {
            name: torch.empty(shape, dtype=dtype, device=CPU)
            for name, (shape, dtype) in batch.items()
            if dtype.is_floating_point
        }
    others = {
        name: torch.ones(shape, dtype=dtype)
        for name, (shape, dtype) in batch.items()
        if not dtype.is_floating_point
    }
    return floats | others | dict(known or {})
