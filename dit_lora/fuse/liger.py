"""Liger's Triton kernels in language models of Transformers: RMSNorm, SwiGLU's product, rotation of q and k.

Source: linkedin/Liger-Kernel (arXiv 2410.10989). Only the kernels are used: its modules replace classes for a
whole process, and its autograd functions overwrite a module's outputs with gradients. Here each is a custom op that
does not change its operands and works with fake tensors and torch.compile. The stock code runs if the kernel cannot,
such as on a CPU or if weights and inputs differ in dtype.

Shapes: B batch, L tokens, H heads, D width of a head; (..., W) of any rank.
"""

from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dit_lora.fuse.patches import Forward, ForwardPatch

OP = "liger"
_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter fails on Liger's kernels: it passes Python floats to them.
_SUPPORTED_DEVICES = ("cuda",)
_ROTATION_NAME = "apply_rotary_pos_emb"
_MODEL_CLASSES = {
    "mistral.modeling_mistral": ("MistralRMSNorm", "MistralMLP", "MistralAttention"),
    "llama.modeling_llama": ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention"),
    "qwen2.modeling_qwen2": ("Qwen2RMSNorm", "Qwen2MLP", "Qwen2Attention"),
    "qwen2_5_vl.modeling_qwen2_5_vl": ("Qwen2_5_VLRMSNorm", "Qwen2MLP", "Qwen2_5_VLAttention"),
    "qwen3.modeling_qwen3": ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"),
    "phi3.modeling_phi3": ("Phi3RMSNorm", "Phi3MLP", "Phi3Attention"),
}
"""The norm, feed-forward and attention of each model, by its module in Transformers."""


def find_unavailable_reason() -> str | None:
    """Reason why Liger's kernels cannot be used on this machine; None if they can."""
    return None if find_spec("liger_kernel") else "liger-kernel is not installed"


def _can_use_kernel(*tensors: Tensor) -> bool:
    """True if Liger's kernels take these tensors together: on a GPU, not empty, all of one supported dtype."""
    first_tensor = tensors[0]
    return (
        first_tensor.device.type in _SUPPORTED_DEVICES
        and first_tensor.dtype in _SUPPORTED_DTYPES
        and first_tensor.numel() > 0
        and all(tensor.dtype is first_tensor.dtype for tensor in tensors)
    )


@torch.library.custom_op("dit_lora::liger_rms_norm", mutates_args=(), device_types=("cpu", "cuda"))
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm with Liger's kernel: x / rms(x) * weight (..., W), rounded before the product as in Llama.

    Also returns 1 / rms, fp32 (rows,).
    """
    from liger_kernel.ops.rms_norm import rms_norm_forward

    # Offset 0: the weight is the factor itself. "llama" casts to the input's dtype before the weight is multiplied.
    out, _, inverse, *_ = rms_norm_forward(x.contiguous(), weight, eps, 0.0, "llama", None)
    return out, inverse


@_rms_norm.register_fake
def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # One value of 1 / rms per row.
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("dit_lora::liger_rms_norm_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of Liger's RMSNorm for x and, if `of_weight` is true, for the weight.

    Otherwise the second result is an empty tensor.
    """
    from liger_kernel.ops.rms_norm import _str_to_casting_mode, rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    width = x.shape[-1]
    dx, dweight = rms_norm_backward(
        dout.contiguous(),
        x.contiguous().view(-1, width),
        weight,
        inverse,
        0.0,
        _str_to_casting_mode["llama"],
        *calculate_settings(width),
        False,  # in place
        None,
        of_weight,
    )
    return dx, weight.new_empty(0) if dweight is None else dweight


@_rms_norm_backward.register_fake
def _fake_rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight) if of_weight else weight.new_empty(0)


def _save_norm_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _compute_norm_gradients(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    """Autograd backward of Liger's RMSNorm: gradients of x and, if it is trained, of the weight; None for eps."""
    needs_weight_grad = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dout, *ctx.saved_tensors, needs_weight_grad)
    return dx, dweight if needs_weight_grad else None, None


_rms_norm.register_autograd(_compute_norm_gradients, setup_context=_save_norm_inputs)


@torch.library.custom_op("dit_lora::liger_swiglu", mutates_args=(), device_types=("cpu", "cuda"))
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU with Liger's kernel: silu(gate) * up, (..., W)."""
    from liger_kernel.ops.swiglu import swiglu_forward

    # Liger also returns its two operands.
    return swiglu_forward(gate.contiguous(), up.contiguous())[2]


@_swiglu.register_fake
def _fake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("dit_lora::liger_swiglu_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up for silu(gate) * up, from Liger's kernel."""
    from liger_kernel.ops.swiglu import swiglu_backward

    # Liger's kernel writes the gradients over its operands, which autograd still holds as saved tensors.
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return swiglu_backward(*copies, dout.contiguous())


@_swiglu_backward.register_fake
def _fake_swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_swiglu_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _compute_swiglu_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return _swiglu_backward(dout, *ctx.saved_tensors)


_swiglu.register_autograd(_compute_swiglu_gradients, setup_context=_save_swiglu_inputs)


@torch.library.custom_op("dit_lora::liger_rotation", mutates_args=(), device_types=("cpu", "cuda"))
def _rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """q and k (B, H, L, D) rotated by Liger's kernel with tables (1 or B, L, 2 * angles).

    The direction is inverse if `back` is true.
    """
    from liger_kernel.ops.rope import rope_backward, rope_forward

    # The kernel writes over its operands, unless it has to copy them: heads after tokens in memory.
    copies = (t.transpose(1, 2).clone(memory_format=torch.contiguous_format) for t in (query, key))
    turned = (rope_backward if back else rope_forward)(*(t.transpose(1, 2) for t in copies), cos, sin)
    return turned[0], turned[1]


@_rotation.register_fake
def _fake_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q, k = (t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (query, key))
    return q, k


def _save_rotation_tables(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Only the tables: a rotation's backward does not need its operands.
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.back = inputs[4]


def _compute_rotation_gradients(ctx: Any, dquery: Tensor, dkey: Tensor) -> tuple[Any, ...]:
    """Autograd backward of the rotation of q and k: the incoming gradients rotated in the other direction.

    The tables get none.
    """
    return (*_rotation(dquery, dkey, *ctx.saved_tensors, not ctx.back), None, None, None)


_rotation.register_autograd(_compute_rotation_gradients, setup_context=_save_rotation_tables)


def norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    """Forward of `MistralRMSNorm`, (..., W). It uses Liger's kernel if device and dtype allow, else the stock code."""
    if not _can_use_kernel(hidden_states, norm.weight):
        return type(norm).forward(norm, hidden_states)
    return _rms_norm(hidden_states, norm.weight, norm.variance_epsilon)[0]


def apply_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each (..., W). It uses Liger's kernel if device and dtype allow, else PyTorch."""
    return _swiglu(gate, up) if _can_use_kernel(gate, up) else F.silu(gate) * up


def mlp_forward(mlp: Any, x: Tensor) -> Tensor:
    """Forward of `MistralMLP`, (..., W). Adapters on its layers run unchanged."""
    return mlp.down_proj(apply_swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def phi3_mlp_forward(mlp: Any, hidden_states: Tensor) -> Tensor:
    """Forward of `Phi3MLP`, (..., W), which computes gate and up with one layer."""
    return mlp.down_proj(apply_swiglu(*mlp.gate_up_proj(hidden_states).chunk(2, dim=-1)))


def attention_forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of an attention class in which only the rotation of q and k is replaced."""
    return _replace_rotation(type(attention).forward)(attention, *args, **kwargs)


@cache
def _replace_rotation(stock: Forward) -> Forward:
    """A copy of an attention class's forward that calls this file's `_rotate` instead of `apply_rotary_pos_emb`.

    The module that defines the class is not changed.
    """
    # The forward calls it as a global of its module. Replacing that would change every model of the process, as
    # Liger's own patch does. A copy of the function with other globals only changes this call.
    assert isinstance(stock, FunctionType)
    module_names = stock.__globals__
    # The globals of the class's own module, with one name replaced.
    names = module_names | {_ROTATION_NAME: partial(_rotate, module_names[_ROTATION_NAME])}
    copy = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    copy.__kwdefaults__ = stock.__kwdefaults__  # the constructor has no argument for these
    return copy


def _rotate(
    stock: Forward, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """q and k (B, H, L, D) rotated with tables (1 or B, L, D).

    Liger's kernel does it if it supports them, otherwise `stock`.
    """
    # The kernel takes heads before tokens, and tables (1 or B, L, D) in the operands' dtype.
    if unsqueeze_dim != 1 or not _can_use_kernel(query, key, cos, sin) or cos.ndim != 3:
        return stock(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return _rotation(query, key, cos, sin, False)


def _find_mlp_problem(mlp: Any) -> str | None:
    """Reason why a feed-forward keeps its stock forward; None if its activation is SiLU."""
    # Compare values: Transformers has several classes and functions for the same activation.
    function: Any = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    probe = torch.linspace(-4, 4, 9, device="cpu")  # also where the model has no values (meta)
    if torch.allclose(function(probe), F.silu(probe)):
        return None
    return f"its activation is {type(function).__name__}"


def _find_rotation_problem(attention: Any) -> str | None:
    forward = type(attention).forward
    names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    return None if _ROTATION_NAME in names else "its rotation has another name"


def _build_patches() -> tuple[ForwardPatch, ...]:
    """List of patches that use Liger's kernels, one for each class in `_MODEL_CLASSES`."""
    patches = []
    for module, (norm, mlp, attention) in _MODEL_CLASSES.items():
        path = f"transformers.models.{module}"
        # Phi-3 computes gate and up with one layer.
        forward = phi3_mlp_forward if mlp == "Phi3MLP" else mlp_forward
        patches += [
            ForwardPatch(f"{path}.{norm}", OP, norm_forward),
            ForwardPatch(f"{path}.{mlp}", OP, forward, _find_mlp_problem),
            ForwardPatch(f"{path}.{attention}", OP, attention_forward, _find_rotation_problem),
        ]
    return tuple(patches)


FORWARDS = _build_patches()
