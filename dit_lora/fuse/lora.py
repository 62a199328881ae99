"""Runs PEFT's LoRA linear layers with the op `lora_linear`, also several layers that share one input.

A layer's state is read at every call, because adapters are merged, disabled and switched at run time. Anything but
the plain case runs PEFT's own forward.

Shapes: I in, O out, R rank; x is (..., I), a layer's output (..., O).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from dit_lora.fuse import fp8
from dit_lora.fuse.casts import cast_adapter
from dit_lora.fuse.patches import ForwardPatch, get_class_name, get_fusion, has_patched_forward
from dit_lora_kernels.lora_linear import (
    COMPUTE_DTYPES,
    Adapter,
    Projection,
    Quantized,
    compute_dtype,
    lora_qkv_unchecked,
)

OP = "lora_linear"
_LINEAR_CLASS = "torch.nn.modules.linear.Linear"
_INT4_CLASS = "bitsandbytes.nn.modules.Linear4bit"
_INT8_CLASS = "bitsandbytes.nn.modules.Linear8bitLt"
_LOW_PRECISION_CLASS = "dit_lora.numerics.quantized_linear.QuantizedLinear"
SUPPORTED_BASES = {
    "peft.tuners.lora.layer.Linear": (_LINEAR_CLASS, _LOW_PRECISION_CLASS),
    "peft.tuners.lora.bnb.Linear4bit": (_INT4_CLASS,),
    "peft.tuners.lora.bnb.Linear8bitLt": (_INT8_CLASS,),
}
"""PEFT's layers that are replaced, and the base layers supported for each. By name: bitsandbytes may be missing."""
# Exactly these classes: a subclass (DTensor, another library's quantized tensor) may redefine a matrix product.
_PLAIN_TENSORS = (nn.Parameter, Tensor, FakeTensor)

_OUTPUT_ATTRIBUTE = "_dit_lora_projected"
"""Attribute in which `project_linear_layers` stores (input, output) for the layer's own call."""


def has_lora(model: nn.Module) -> bool:
    """True if any of these layers has a LoRA adapter."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


def find_lora_problem(layer: Any) -> str | None:
    """Reason why a layer must run PEFT's own LoRA forward; None if `lora_linear` computes the same."""
    parts = _read_lora_operands(layer)
    return parts if isinstance(parts, str) else None


def lora_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA linear layer's output (..., O), computed with `lora_linear` if `find_lora_problem` is None."""
    # While compiling, `project_linear_layers` leaves nothing here, and Dynamo could not trace the look.
    if not torch.compiler.is_compiling():
        # Compare the input by identity: if a hook replaced it, the stored output belongs to another input.
        source, y = layer.__dict__.pop(_OUTPUT_ATTRIBUTE, (None, None))
        if source is x and y is not None and not (args or kwargs):
            return y
    parts = "given more than x" if args or kwargs else _read_lora_operands(layer)
    if isinstance(parts, str):
        return type(layer).forward(layer, x, *args, **kwargs)
    dtype = compute_dtype(x, parts.weight)
    y = lora_qkv_unchecked(x, [_build_projection(layer, parts, dtype)], dtype, parts.dropout)[0]
    return _add_frozen_adapters(layer, parts.frozen_adapters, x, y) if parts.frozen_adapters else y


def project_linear_layers(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Apply several linear layers to the same input (..., I).

    If all are fused LoRA layers, x is saved for backward only once.

    A layer is fused if its forward is patched with `lora_forward` and the op is on. If any layer has hooks, the layers
    are still called and return the outputs computed here: hooks see every call, and their presence changes no bit.
    """
    outputs = _project_shared_input(layers, x)
    if outputs is None:
        return tuple(layer(x) for layer in layers)
    # No observers, so no calls are needed: no layer with hooks comes here while compiling (`_project_shared_input`).
    if torch.compiler.is_compiling() or not has_module_or_global_hooks(layers):
        return outputs
    for layer, y in zip(layers, outputs, strict=True):
        layer.__dict__[_OUTPUT_ATTRIBUTE] = (x, y)
    try:
        return tuple(layer(x) for layer in layers)
    finally:
        # Also if a call raised, or a wrapper skipped a layer: the output must not stay for another call.
        for layer in layers:
            layer.__dict__.pop(_OUTPUT_ATTRIBUTE, None)


def has_module_or_global_hooks(layers: Sequence[nn.Module]) -> bool:
    """True if calling any of the layers runs hooks. They are hooks of the layer or PyTorch's global module hooks."""
    if _has_any_global_hook():
        return True
    for layer in layers:  # noqa: SIM110 - runs at every layer's call, and a generator doubles the time
        if _has_hooks(layer):
            return True
    return False


def _project_shared_input(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...] | None:
    """Outputs of several LoRA layers with the same input, computed in one op.

    None if a layer has more than a plain LoRA, or they differ in dropout or dtype.
    """
    # A single layer has no input to share.
    if len(layers) < 2:
        return None
    parts = []
    for layer in layers:
        fusion = get_fusion(layer)
        if fusion is None or not fusion.is_on(OP) or not has_patched_forward(layer):
            return None
        # While compiling, `project_linear_layers` does not call the layers, so hooks would miss their calls.
        if torch.compiler.is_compiling() and _has_hooks(layer):
            return None
        reading = _read_lora_operands(layer)
        if isinstance(reading, str):
            return None
        parts.append(reading)
    first_part, *other_parts = parts
    dtype = compute_dtype(x, first_part.weight)
    for part in other_parts:
        if part.dropout != first_part.dropout:
            return None
        if _get_base_dtype(part) is not _get_base_dtype(first_part) and compute_dtype(x, part.weight) is not dtype:
            return None
    operands = [_build_projection(layer, part, dtype) for layer, part in zip(layers, parts, strict=True)]
    outputs = lora_qkv_unchecked(x, operands, dtype, first_part.dropout)
    return tuple(
        _add_frozen_adapters(layer, part.frozen_adapters, x, y) if part.frozen_adapters else y
        for layer, part, y in zip(layers, parts, outputs, strict=True)
    )


def _add_frozen_adapters(layer: Any, adapter_names: Sequence[str], x: Tensor, y: Tensor) -> Tensor:
    """Add the outputs of a layer's frozen adapters (..., O) to y.

    Each is computed with its PEFT modules, as PEFT does.
    """
    total = y
    for name in adapter_names:
        a, b = layer.lora_A[name], layer.lora_B[name]
        # In the adapter's own dtype, as PEFT computes.
        adapter_input = layer.lora_dropout[name](layer._cast_input_dtype(x, a.weight.dtype))
        total = total + b(a(adapter_input)) * layer.scaling[name]
    return total.to(y.dtype)


class _LoraOperands(NamedTuple):
    """The operands of a LoRA linear layer."""

    adapter_name: str
    base: Any
    weight: Tensor | None
    """The base layer's; None if it is quantized."""
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float
    frozen_adapters: Sequence[str]
    """Names of frozen adapters that are active at the same time."""


def _get_base_dtype(operands: _LoraOperands) -> torch.dtype | None:
    """Dtype of the base weight, which decides the compute dtype together with the input's; None if quantized."""
    return None if operands.weight is None else operands.weight.dtype


def _read_lora_operands(layer: Any) -> _LoraOperands | str:
    """The operands of a LoRA layer, or the reason (text) why its forward does more than `lora_linear` computes."""
    # By exact class: a subclass may compute something else.
    base_classes = SUPPORTED_BASES.get(get_class_name(layer))
    if base_classes is None:
        return "not one of PEFT's LoRA linear layers"
    if layer.disable_adapters:
        return "its adapters are disabled"
    if layer.merged_adapters:
        return "its adapter is merged"
    # Bypass `nn.Module.__getattr__`, the slowest part of this function: it runs at every call of every layer.
    modules = layer._modules
    a_modules = modules["lora_A"]._modules
    active = layer.active_adapter  # a name, or a list of them
    names = [active] if isinstance(active, str) else active
    names = [name for name in names if name in a_modules]
    # Of several active adapters, exactly one must be trained.
    candidates = names if len(names) == 1 else [name for name in names if a_modules[name].weight.requires_grad]
    if len(candidates) != 1:
        return f"{len(names)} active adapters"
    name = candidates[0]
    base = modules["base_layer"]
    kind = get_class_name(base)
    if kind not in base_classes:
        return f"its base is a {type(base).__name__}"
    if any(adapter in layer.lora_variant for adapter in names):
        return "its adapter is DoRA or another variant"
    a, b = a_modules[name], modules["lora_B"]._modules[name]
    dropout = modules["lora_dropout"]._modules[name]
    # These modules are not called, so hooks on them (an observer's or an offload's) would not run.
    if is_hooked(base, a, b, dropout):
        return "hooks on its base, A, B or dropout"
    plain = type(a) is nn.Linear and type(b) is nn.Linear
    if not plain or b._parameters["bias"] is not None:
        return "its A or B is more than a matrix"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"its dropout is a {type(dropout).__name__}"
    # In eval mode dropout does nothing.
    rate = dropout.p if dropout.training and type(dropout) is nn.Dropout else 0.0
    if rate == 1:
        return "its dropout drops everything"
    weight, bias = _get_parameter(base, "weight"), _get_parameter(base, "bias")
    low_a, low_b = _get_parameter(a, "weight"), _get_parameter(b, "weight")
    # Reasons that depend on the tensors themselves: sharded, trained, or an unsupported quantization.
    reason = _find_tensor_problem(layer, weight, bias, low_a, low_b, layer.r[name])
    reason = reason or _find_base_problem(kind, layer, base, weight)
    if reason is not None:
        return reason
    # A quantized base is passed as a module, whose product includes the bias.
    if kind != _LINEAR_CLASS:
        weight = bias = None
    frozen_names = [adapter for adapter in names if adapter != name]
    return _LoraOperands(name, base, weight, bias, low_a, low_b, layer.scaling[name], rate, frozen_names)


def _get_parameter(module: Any, name: str) -> Any:
    """The module's parameter of this name, or the tensor that a parametrization puts in its place."""
    # Bypass the slow `nn.Module.__getattr__` unless the parameter is replaced, as by a parametrization.
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _has_hooks(module: nn.Module) -> bool:
    """True if calling this module runs hooks registered on it."""
    # Private attributes: PyTorch has no public API for this. `Module.__call__` checks the same four.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_hooked(*modules: nn.Module) -> bool:
    """True if a call of any of these modules runs more than the forward of its class.

    That is the case with hooks, and if offload replaced the forward on the instance.
    """
    for module in modules:
        # `_has_hooks` inlined: adapted layers check four modules at every call.
        if (
            "forward" in module.__dict__
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return True
    return False


def _find_tensor_problem(layer: Any, weight: Any, bias: Any, a: Tensor, b: Tensor, rank: int) -> str | None:
    """Reason why `lora_linear` cannot take these tensors (sharded, trained or of another layout); None if it can."""
    shape = (layer.out_features, layer.in_features)
    # ZeRO-3 leaves an empty tensor in place of a parameter that is not gathered.
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        return "its A or B is sharded"
    if type(a) not in _PLAIN_TENSORS or type(b) not in _PLAIN_TENSORS:
        return "its A or B is no plain tensor"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base is trained"
    if bias is not None and type(bias) not in _PLAIN_TENSORS:
        return "its bias is no plain tensor"
    return None


def _find_base_problem(kind: str, layer: Any, base: Any, weight: Tensor) -> str | None:
    """Reason why `lora_linear` cannot take a base layer of this class, one of `SUPPORTED_BASES`; None if it can."""
    if kind == _INT8_CLASS:
        return "its int8 base keeps 16-bit weights" if base.state.has_fp16_weights else None
    if kind == _INT4_CLASS:
        state = getattr(base.weight, "quant_state", None)
        if state is None or tuple(state.shape) != (layer.out_features, layer.in_features):
            return "its base is not quantized, or transposed"
        # In eval mode bitsandbytes may repack a CPU's weight for inference; nothing can dequantize it for backward.
        packs = getattr(base, "support_avx512bf16_for_cpu", False) and not base.training
        packed = getattr(state, "packing_format_for_cpu", False)
        if base.weight.device.type == "cpu" and (packs or packed):
            return "its base is packed for inference on a CPU"
        return None
    if layer.fan_in_fan_out:
        return "its base weight is transposed"
    if kind == _LOW_PRECISION_CLASS:
        return None
    if type(weight) not in _PLAIN_TENSORS or weight.shape != (layer.out_features, layer.in_features):
        return "its base weight is sharded, or no plain tensor"
    if weight.dtype not in COMPUTE_DTYPES:
        return f"its base weight is in {weight.dtype}"
    return None


def _dequantize(base: Any, dtype: torch.dtype) -> Tensor:
    """Dequantize the weight of a base layer to (O, I) in `dtype`."""
    kind = get_class_name(base)
    # bitsandbytes is imported late: only models with such a base need it.
    if kind == _INT4_CLASS:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(base.weight.data, base.weight.quant_state).to(dtype)
    if kind == _INT8_CLASS:
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(base.state.CB, base.state.SCB).to(dtype)
    return base.dequantize(dtype)  # of `model.quantize`


def _build_projection(layer: nn.Module, operands: _LoraOperands, dtype: torch.dtype) -> Projection:
    """A LoRA layer's operands for `lora_linear` in `dtype`.

    A quantized base is passed as module and dequantize function.
    """
    name, base, weight, bias, a, b, scaling, *_ = operands
    adapter = Adapter(a, b, scaling, cast_adapter(layer, name, a, b, scaling, dtype))
    if weight is None:
        # Called when the weight itself is needed, so that no dequantized copy is kept.
        return Projection(None, None, adapter, Quantized(base, partial(_dequantize, base)))
    return Projection(weight, bias, adapter, None, fp8.get_fp8_weight(layer, base, dtype))


FORWARDS = tuple(
    ForwardPatch(base, OP, lora_forward, find_current_problem=find_lora_problem, replaces_submodules=True)
    for base in SUPPORTED_BASES
)
