"""One micro-step's peak on fake tensors, as the allocator would see it; a GPU's is counted on fake CPU tensors.

What differs there is put in: CUDA's autocast keeps other ops in fp32 than the CPU's, and its RMSNorm is one op.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from dit_lora.data.cache.cache import Spec
from dit_lora.families.base import Tensors
from dit_lora.patching import Patches
from dit_lora.training.execution.activation_checkpointing import (
    BLOCK_CALLERS,
    Mode,
    blocks_called_by,
)
from dit_lora.training.execution.fake_step import FakeStep, Losses

# torch/include/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE: what CUDA's autocast computes
# in fp32 and the CPU's does not, by the names that Python calls it by. A fake tensor of CUDA would meet the real rules,
# but tables and draws beside it must be real, and there may be no GPU to make them on.
_NAMES = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
layer_norm rms_norm group_norm cosine_similarity nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
binary_cross_entropy_with_logits dist cdist renorm logsumexp cross_entropy prod softmax log_softmax cumprod cumsum
norm sum
"""
FP32 = frozenset(_NAMES.split())


class _RMSNorm(torch.autograd.Function):
    """The bytes that CUDA's one op for it saves: input and one number a row."""

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
        if torch.is_autocast_enabled("cpu") and name in FP32:
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
            if name == "rms_norm":
                return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
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

    def under(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return forward(*args, **kwargs)

    patches = Patches()
    patches.method(model, "forward", convert_outputs_to_fp32(under))
    try:
        with CudaAutocast() if gpu else nullcontext():
            yield
    finally:
        patches.undo()


def step_peak(
    transformer: nn.Module,
    losses: Losses,
    batch: Spec,
    mode: Mode,
    *,
    known: Tensors | None = None,
    gradients_exist: bool = False,
) -> int:
    """Return the most bytes that a micro-step takes beside weights and batch: activations, and gradients as they come.

    Forward and backward under a checkpointing mode, which is off afterwards. `gradients_exist`: of earlier micro-steps,
    and so counted elsewhere. Raises as `FakeStep.run`.
    """
    step = FakeStep(transformer, batch, known)
    if gradients_exist:
        for weight in step.weights.values():
            if weight.requires_grad:
                weight.grad = torch.empty_like(weight)
    caller = _within_autocast(BLOCK_CALLERS[mode])
    with blocks_called_by(transformer, caller), step.live() as live:
        step.run(lambda model, tensors: losses(model, tensors).losses.mean().backward())
    return live.most


def _within_autocast(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Function modes are off in the backward pass, where a block that is computed again needs `CudaAutocast` too."""
    modes = _get_current_function_mode_stack()
    if call is None or not any(isinstance(mode, CudaAutocast) for mode in modes):
        return call

    def run(block: Callable[..., Any], *args: Any) -> Any:
        def under(*inputs: Any) -> Any:
            with CudaAutocast():
                return block(*inputs)

        return call(under, *args)

    return run
