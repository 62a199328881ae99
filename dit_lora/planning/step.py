"""The memory peak of one micro-step on fake tensors, as the allocator would see it.

A GPU's peak is computed on fake CPU tensors, with the differences emulated: CUDA's autocast runs other ops in fp32
than the CPU's, and its RMSNorm is one op.
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
from dit_lora.training.execution.activation_checkpointing import BLOCK_CALLERS, CheckpointingMode, use_block_caller
from dit_lora.training.execution.fake_step import FakeStep, Losses

# Source: torch/include/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE. Python names of the ops
# that CUDA's autocast computes in fp32 and the CPU's does not. Fake CUDA tensors would follow the real rules, but the
# tables and random draws used with them must be real, and there may be no GPU to make them on.
_FP32_OP_NAMES = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
layer_norm rms_norm group_norm cosine_similarity nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
binary_cross_entropy_with_logits dist cdist renorm logsumexp cross_entropy prod softmax log_softmax cumprod cumsum
norm sum
"""
FP32_OPS = frozenset(_FP32_OP_NAMES.split())


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves as many bytes for backward as CUDA's fused one: the input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        # The second one stands for the reciprocal root mean square of each row.
        ctx.save_for_backward(x, x.new_empty(x.shape[: x.dim() - dims]), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Gradients have the right sizes and no meaningful values.
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class CudaAutocast(TorchFunctionMode):
    """Context in which the CPU's autocast casts the ops that CUDA's would.

    Only for counting: RMSNorm computes no values.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        # Outside of autocast, ops run in the dtype of their inputs on every device.
        if torch.is_autocast_enabled("cpu") and name in FP32_OPS:
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
            if name == "rms_norm":
                return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    """Cast a half-precision tensor to fp32. Anything else is returned unchanged."""
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
def emulate_autocast(model: nn.Module, dtype: torch.dtype, *, is_gpu: bool) -> Iterator[None]:
    """Context in which `model` runs under autocast, as Accelerate prepares it. With fp32 nothing changes."""
    if dtype is torch.float32:
        yield
        return

    def run_with_autocast(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return forward(*args, **kwargs)

    patches = Patches()
    # Accelerate wraps `forward` in the same way, so outputs are fp32 here too.
    patches.wrap_method(model, "forward", convert_outputs_to_fp32(run_with_autocast))
    try:
        with CudaAutocast() if is_gpu else nullcontext():
            yield
    finally:
        patches.undo()


def measure_step_peak(
    transformer: nn.Module,
    losses: Losses,
    batch: Spec,
    mode: CheckpointingMode,
    *,
    integer_inputs: Tensors | None = None,
    has_gradients: bool = False,
) -> int:
    """Peak bytes of one micro-step without weights and batch: activations, and gradients as backward produces them.

    Runs forward and backward with the given activation checkpointing, which is off again afterwards.

    Args:
        transformer: The model on the meta device.
        losses: Computes the losses of a batch.
        batch: Shapes and dtypes of the batch's tensors.
        mode: The activation checkpointing.
        integer_inputs: Integer tensors with values that the model's shapes depend on.
        has_gradients: Gradients of earlier micro-steps exist, and are counted elsewhere.

    Raises:
        As `FakeStep.run_block`.
    """
    # Weights and batch become fake tensors, which have sizes and no memory.
    step = FakeStep(transformer, batch, integer_inputs)
    # Backward then adds into these instead of allocating new ones.
    if has_gradients:
        for weight in step.weights.values():
            if weight.requires_grad:
                weight.grad = torch.empty_like(weight)
    caller = _wrap_block_call_in_autocast(BLOCK_CALLERS[mode])
    with use_block_caller(transformer, caller), step.track_allocations() as live:
        step.run_on_fake_weights(lambda model, tensors: losses(model, tensors).losses.mean().backward())
    return live.max_bytes


def _wrap_block_call_in_autocast(block_caller: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Run a block under CUDA's autocast also when backward recomputes it, where PyTorch turns function modes off."""
    # No public function tells whether a function mode is active.
    modes = _get_current_function_mode_stack()
    if block_caller is None or not any(isinstance(mode, CudaAutocast) for mode in modes):
        return block_caller

    def run_block(block: Callable[..., Any], *args: Any) -> Any:
        def run_in_autocast(*inputs: Any) -> Any:
            with CudaAutocast():
                return block(*inputs)

        return block_caller(run_in_autocast, *args)

    return run_block
