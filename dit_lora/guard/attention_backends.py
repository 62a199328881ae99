"""Record a model's `scaled_dot_product_attention` calls, and measure each backend's error at exactly these calls.

Shapes: B batch, H heads, L queries, S keys, D head width.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dit_lora.numerics.streams import make_generator

Attention = Callable[..., torch.Tensor]
"""Called like `torch.nn.functional.scaled_dot_product_attention`, with all arguments after q, k, v by name."""

BACKENDS: Mapping[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

# Largest error over largest value: three times what a right backend was measured to err by, over 44 calls on a
# CPU with 1 to 1,300 keys. Math, in fp32 inside, errs by 3.5e-3 in bf16, 5e-4 in fp16, 2.3e-5 in fp32; flash,
# which rounds probabilities too, by 1.3e-2, 1.8e-3, 7.4e-5. What was wrong erred by 0.15 to 220.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.bfloat16: 4e-2,
    torch.float16: 6e-3,
    torch.float32: 3e-4,
    torch.float64: 1e-10,
}
_TF32_TOLERANCE = TOLERANCE[torch.float16]  # TF32 has fp16's mantissa

# Starts of torch's messages when no allowed backend supports a call: on CUDA, and on a CPU.
_UNSUPPORTED_MESSAGES = ("No available kernel", "No viable backend")
_RESULT_NAMES = ("out", "dq", "dk", "dv")
_QUERIES_PER_CHUNK = 1024  # queries of the reference at a time: 1,024 x 2 heads x 18,000 keys in fp64 is 0.3 GB


class TensorLayout(NamedTuple):
    """Shape and strides of a tensor argument of attention, since kernel bugs depend on both."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), tensor.stride())

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    def keep_one_sample_and_few_heads(self, max_heads: int) -> "TensorLayout":
        """Layout of one sample and of at most `max_heads` of its heads, with the same strides."""
        # The leading dimensions are batch and heads, or heads only; the last two are length and head width.
        leading_shape = self.shape[:-2]
        # One sample along each batch dimension, and at most the given number of heads along the last.
        limits = (*([1] * (len(leading_shape) - 1)), max_heads)
        leading_sizes = (min(size, limit) for size, limit in zip(leading_shape, limits, strict=False))
        return self._replace(shape=(*leading_sizes, *self.shape[-2:]))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored values of a tensor that may be expanded: size 1 along expanded dimensions."""
        return tuple(size if stride else 1 for size, stride in zip(*self, strict=True))

    def build_tensor(self, values: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Create a tensor with this layout that holds `values`, which have the shape `stored_shape`."""
        # An expanded dimension has stride 0 and is stored once: allocate size 1, and expand afterwards.
        stored = torch.empty_strided(self.stored_shape, self.strides, dtype=dtype, device=device)
        return stored.copy_(values).expand(self.shape)


@dataclass(frozen=True)
class AttentionMaskLayout:
    """Description of an `attn_mask` without its values."""

    layout: TensorLayout
    dtype: torch.dtype
    min_value: float
    """The smallest value: False, or the value added to masked logits."""
    has_empty_row: bool
    """True if a query attends to no key at all."""


@dataclass(frozen=True)
class AttentionCall:
    """Description of a `scaled_dot_product_attention` call: all that a backend's choice and correctness depend on.

    Only the values are left out.
    """

    query: TensorLayout
    key: TensorLayout
    value: TensorLayout
    dtype: torch.dtype
    device: torch.device
    mask: AttentionMaskLayout | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def output_layout(self) -> TensorLayout:
        """Layout of an attention call's output and of its gradient: the query's layout if their shapes are equal."""
        # (B, H, L, head width of the values)
        shape = (*self.query.shape[:-1], self.value.shape[-1])
        if shape == self.query.shape:
            return self.query
        # A contiguous layout. The meta device computes its strides without allocating memory.
        return TensorLayout.from_tensor(torch.empty(shape, device="meta"))

    @property
    def logit_scale(self) -> float:
        # PyTorch's default scale is 1 / sqrt(D).
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tolerance(self) -> float:
        # Below "highest", PyTorch may compute fp32 matrix products in TF32.
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return _TF32_TOLERANCE if tf32 and self.dtype is torch.float32 else TOLERANCE[self.dtype]

    def __str__(self) -> str:
        facts = [f"q {self.query}, k {self.key}, v {self.value}, {self.dtype} on {self.device}"]
        if self.mask is not None:
            empty = " with empty rows" if self.mask.has_empty_row else ""
            facts.append(f"{self.mask.dtype} mask {self.mask.layout}{empty}")
        facts += ["causal"] * self.is_causal + ["grouped queries"] * self.enable_gqa
        return ", ".join(facts)

    def reduce_to_one_sample(self) -> "AttentionCall":
        """Reduce an attention call to one sample and two heads.

        Lengths, D and strides, on which bugs depend, are unchanged. With grouped queries, two groups of at most two
        queries are kept.
        """
        key, heads = self.key.keep_one_sample_and_few_heads(2), 2
        if self.enable_gqa:
            # Each key head serves a group of query heads. Keep at most two queries of each group.
            heads = key.shape[-3] * min(2, self.query.shape[-3] // self.key.shape[-3])
        return replace(
            self,
            query=self.query.keep_one_sample_and_few_heads(heads),
            key=key,
            value=self.value.keep_one_sample_and_few_heads(2),
            mask=self.mask and replace(self.mask, layout=self.mask.layout.keep_one_sample_and_few_heads(heads)),
        )


@dataclass(frozen=True)
class BackendParity:
    """Errors of one attention backend at one call, or the reason why it did not run."""

    call: AttentionCall
    name: str
    is_supported: bool
    """True if the backend supports the call. If it does not, PyTorch cannot choose it, so it does no harm."""
    reason: str
    """torch's message if the backend did not run the call, or failed."""
    errors: Mapping[str, float]
    """Largest error over largest value of out, dq, dk and dv; empty if the backend did not run."""

    @property
    def is_finite(self) -> bool:
        return bool(self.errors) and all(map(math.isfinite, self.errors.values()))

    @property
    def is_accurate(self) -> bool:
        """True if the backend's errors at this call are within the tolerance, so that it can be used for training."""
        return self.is_finite and max(self.errors.values()) <= self.call.tolerance

    def __str__(self) -> str:
        if not self.errors:
            return f"{self.call}: {self.reason}"
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        return f"{self.call}: errors {errors}, tolerance {self.call.tolerance:g}"


def use_only_backend(name: str) -> AbstractContextManager[Any]:
    """Allow only this attention backend inside the context. A call that it does not support raises RuntimeError."""
    return sdpa_kernel([BACKENDS[name]])


@contextmanager
def record_attention_calls() -> Iterator[Counter[AttentionCall]]:
    """Count each distinct attention call that this thread makes inside the context.

    Reads masks, so it waits for the device.
    """
    with _AttentionRecorder() as recorder:
        yield recorder.calls


class _AttentionRecorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[AttentionCall] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls[_describe_call(*args, **kwargs)] += 1
        return func(*args, **kwargs)


def _describe_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Record of an attention call (shapes, dtypes, mask), from the parameters of `scaled_dot_product_attention`."""
    mask = None
    if attn_mask is not None:
        values, mask_dtype = attn_mask.detach(), _get_compute_dtype(attn_mask)
        if values.is_floating_point():
            # Half of the dtype's range masks a key whatever its logit is; a bias stays far from that.
            empty_rows = values.amax(-1) < torch.finfo(mask_dtype).min / 2
            min_value = values.min().item()
        else:
            # In a boolean mask True keeps a key, so a row without any True is empty.
            empty_rows, min_value = ~values.any(-1), 0.0
        mask = AttentionMaskLayout(
            TensorLayout.from_tensor(attn_mask), mask_dtype, min_value, has_empty_row=bool(empty_rows.any())
        )
    return AttentionCall(
        query=TensorLayout.from_tensor(query),
        key=TensorLayout.from_tensor(key),
        value=TensorLayout.from_tensor(value),
        dtype=_get_compute_dtype(query),
        device=query.device,
        mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _get_compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype that an attention call computes in, which autocast changes and a function mode does not see."""
    kind = tensor.device.type
    if tensor.is_floating_point() and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def measure_backend_parity(
    call: AttentionCall, name: str, *, attention: Attention = F.scaled_dot_product_attention, seed: int = 0
) -> BackendParity:
    """Compare one attention backend's values and gradients at this call, on random inputs, with fp64 math.

    Runs `call.reduce_to_one_sample()` once for each kind of inputs of `_make_random_inputs`, without dropout, which
    cannot be compared; the largest errors count.
    """
    small = call.reduce_to_one_sample()
    input_kinds = ["usual", "low"]
    if call.mask is not None and call.mask.has_empty_row:
        input_kinds.append("empty_row")
    errors = []
    for input_kind in input_kinds:
        inputs = _make_random_inputs(small, input_kind, seed)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")  # where torch says why a backend cannot run a call
            try:
                with use_only_backend(name):
                    results = _compute_attention_results(small, inputs, attention)
            except torch.AcceleratorError:
                raise  # the device is lost, so nothing else can run on it
            except RuntimeError as error:
                reason = "; ".join([str(error), *(str(warning.message) for warning in caught_warnings)])
                # A backend that supports the call and raises any other error would end a run.
                is_unsupported = isinstance(error, torch.OutOfMemoryError)
                is_unsupported = is_unsupported or str(error).startswith(_UNSUPPORTED_MESSAGES)
                return BackendParity(call, name, not is_unsupported, reason, errors={})
        errors.append(_compute_errors(small, inputs, results))
    worst = torch.stack(errors).amax(0).tolist()  # NaN if any is
    return BackendParity(call, name, True, "", dict(zip(_RESULT_NAMES, worst, strict=True)))


class _AttentionInputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    mask: torch.Tensor | None


def _make_random_inputs(call: AttentionCall, kind: str, seed: int) -> _AttentionInputs:
    """Random inputs in the layouts of an attention call.

    A mask hides 3 keys in 10, and never all except in one row of `empty_row`. `low` makes every logit smaller by 120
    than `usual`, which must not change the softmax: exp(-logit) is then beyond fp32, and a backward pass that computes
    it gives NaN (pytorch#196678).
    """
    random = make_generator(seed, f"attention/{kind}")
    layouts = (call.query, call.key, call.value, call.output_layout)
    query, key, value, grad = (torch.randn(layout.stored_shape, generator=random) for layout in layouts)
    if kind == "low":
        # Each key now sums to D. Lowering the query by 120 / (scale * D) lowers each logit by 120.
        key = key - key.mean(-1, keepdim=True) + 1
        query = query - 120 / (call.logit_scale * call.query.shape[-1])
    query, key, value, grad = (
        layout.build_tensor(values, dtype=call.dtype, device=call.device)
        for layout, values in zip(layouts, (query, key, value, grad), strict=True)
    )
    mask = None if call.mask is None else _make_random_mask(call, call.mask, kind, random)
    return _AttentionInputs(query, key, value, grad, mask)


def _make_random_mask(call: AttentionCall, mask: AttentionMaskLayout, kind: str, rng: torch.Generator) -> torch.Tensor:
    # Boolean, True for about 7 keys in 10.
    allowed = torch.rand(mask.layout.stored_shape, generator=rng) < 0.7
    # Keep the first key, so that rows are empty only where that is intended.
    allowed[..., 0] = True
    if kind == "empty_row":
        # The last query of the last sample and head attends to no key.
        allowed.view(-1, allowed.shape[-1])[-1] = False
    if mask.dtype is not torch.bool:
        # An additive mask: 0 for allowed keys, the recorded minimum for all others.
        low = torch.tensor(mask.min_value, dtype=mask.dtype)
        allowed = torch.where(allowed, torch.zeros_like(low), low)
    return mask.layout.build_tensor(allowed, dtype=mask.dtype, device=call.device)


def _compute_attention_results(
    call: AttentionCall, inputs: _AttentionInputs, attention: Attention
) -> list[torch.Tensor]:
    """Compute attention and its gradients: out, dq, dk and dv, each detached."""
    # Fresh leaves, so that their gradients are exactly dq, dk and dv.
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    with torch.enable_grad(), torch.autocast(call.device.type, enabled=False):
        output = attention(
            *leaves, attn_mask=inputs.mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )
        return [output.detach(), *torch.autograd.grad(output, leaves, inputs.grad)]


def _compute_fp64_attention(call: AttentionCall, inputs: _AttentionInputs) -> list[torch.Tensor]:
    """Compute attention and its gradients in fp64, as the reference for `_compute_attention_results`.

    It is computed for a slice of the queries at a time to limit memory.
    """
    length, keys = call.query.shape[-2], call.key.shape[-2]
    query, key, value, grad = (tensor.double() for tensor in inputs[:4])
    mask = inputs.mask
    if call.is_causal:
        # `is_causal` would restart at each slice of queries, so use an explicit (L, S) mask.
        mask = torch.ones(length, keys, dtype=torch.bool, device=call.device).tril()
    elif mask is not None:
        # A mask may broadcast along L and S; expand both, so that it can be sliced by query.
        mask = mask.expand(*mask.shape[:-2], length, keys)
        mask = mask.double() if mask.is_floating_point() else mask
    call = replace(call, is_causal=False)
    parts = []
    for start in range(0, length, _QUERIES_PER_CHUNK):
        # Queries are (..., L, D) and the mask is (..., L, S): slice both along L.
        rows = (..., slice(start, start + _QUERIES_PER_CHUNK), slice(None))
        part = _AttentionInputs(query[rows], key, value, grad[rows], None if mask is None else mask[rows])
        with use_only_backend("math"):
            parts.append(_compute_attention_results(call, part, F.scaled_dot_product_attention))
    # The output and dq belong to single queries, while dk and dv are sums over all queries.
    output_parts, query_grads, key_grads, value_grads = zip(*parts, strict=True)
    return [torch.cat(output_parts, -2), torch.cat(query_grads, -2), sum(key_grads), sum(value_grads)]


def _compute_errors(call: AttentionCall, inputs: _AttentionInputs, results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest error of each attention result, divided by its largest reference value, (4,).

    The divisor is at least the size that a result has with evenly spread attention: with one key, or with every key
    masked, the reference is zero and only rounding is left.
    """
    length, keys = call.query.shape[-2], call.key.shape[-2]
    # Typical sizes of out, dq, dk and dv if attention is spread evenly over the keys.
    logit_grad = call.logit_scale * math.sqrt(call.query.shape[-1])
    sizes = (
        keys**-0.5,
        logit_grad * _compute_rms(inputs.key) * keys**-0.5,
        logit_grad * _compute_rms(inputs.query) * length**0.5 / keys,
        length**0.5 / keys,
    )
    errors = [
        (result.double() - expected).abs().max() / expected.abs().max().clamp(min=size)
        for result, expected, size in zip(results, _compute_fp64_attention(call, inputs), sizes, strict=True)
    ]
    return torch.stack(errors)


def _compute_rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
