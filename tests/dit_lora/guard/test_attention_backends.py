"""Calls are recorded as they are made, right backends pass at them, and each kind of wrong one does not."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cuda
from torch.nn import functional as F

from dit_lora.guard.attention_backends import (
    BACKENDS,
    TOLERANCE,
    Attention,
    AttentionCall,
    AttentionMaskLayout,
    TensorLayout,
    measure_backend_parity,
    record_attention_calls,
    use_only_backend,
)

HALF = [torch.bfloat16, torch.float16]


def recorded(dtype: torch.dtype = torch.float32, **arguments: Any) -> AttentionCall:
    """One call of 3 samples, 4 heads, 46 queries, 37 keys, width 16, laid out as Diffusers does it."""
    query, key, value = (torch.randn(3, length, 4, 16, dtype=dtype).transpose(1, 2) for length in (46, 37, 37))
    with record_attention_calls() as calls:
        F.scaled_dot_product_attention(query, key, value, **arguments)
    (call,) = calls
    return call


def padding_mask(*, empty: bool) -> torch.Tensor:
    """(B, 1, 1, S), as text encoders' masks come; the last sample's caption may be empty."""
    mask = torch.ones(3, 1, 1, 37, dtype=torch.bool)
    mask[1, ..., 20:] = False
    mask[2, ..., 0 if empty else 5 :] = False
    return mask


def test_a_models_calls_are_counted_with_their_facts(tiny_checkpoints: dict[str, Path]) -> None:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel.from_pretrained(
        tiny_checkpoints["cogvideox-2b"], subfolder="transformer", dtype=torch.bfloat16
    )
    latents = torch.randn(2, 3, 4, 4, 6, dtype=torch.bfloat16)
    text = torch.randn(2, 226, 32, dtype=torch.bfloat16)
    with record_attention_calls() as calls:
        model(latents, text, torch.tensor([3, 700]))
    (call,) = calls
    assert calls[call] == 2  # one a block
    assert call.query.shape == (2, 4, 226 + 3 * 2 * 3, 16)
    assert call.query.strides == (244 * 64, 244 * 16, 16, 1)  # a norm made it contiguous
    assert call.value.strides == (244 * 64, 16, 64, 1)
    assert (call.dtype, call.device.type, call.mask) == (torch.bfloat16, "cpu", None)
    assert (call.dropout_p, call.is_causal, call.scale, call.enable_gqa) == (
        0.0,
        False,
        None,
        False,
    )


def test_calls_that_differ_are_kept_apart_and_results_are_untouched() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 16)
    mask = torch.rand(6, 6) > 0.5
    plain = F.scaled_dot_product_attention(query, key, value, mask)
    with record_attention_calls() as calls:
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, mask), plain)
        F.scaled_dot_product_attention(query, key, value=value, attn_mask=mask, dropout_p=0.0)
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
        F.scaled_dot_product_attention(query, key, value, scale=0.3, dropout_p=0.1)
        F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)
        F.scaled_dot_product_attention(query.mT.contiguous().mT, key, value)
    F.scaled_dot_product_attention(query, key, value)
    assert sorted(calls.values()) == [1, 1, 1, 1, 2]
    assert Counter(call.is_causal for call in calls) == {False: 4, True: 1}
    assert {call.scale for call in calls} == {None, 0.3}
    assert {call.dropout_p for call in calls} == {0.0, 0.1}
    assert sum(call.enable_gqa for call in calls) == 1


def test_a_mask_is_recorded_with_whether_a_row_of_it_is_empty() -> None:
    mask = recorded(attn_mask=padding_mask(empty=False)).mask
    assert mask is not None
    assert (mask.layout.shape, mask.dtype, mask.has_empty_row) == ((3, 1, 1, 37), torch.bool, False)
    mask = recorded(attn_mask=padding_mask(empty=True)).mask
    assert mask is not None
    assert mask.has_empty_row
    for low in (-math.inf, torch.finfo(torch.float32).min):
        for empty in (False, True):
            float_mask = torch.zeros(3, 1, 1, 37).masked_fill(~padding_mask(empty=empty), low)
            mask = recorded(attn_mask=float_mask).mask
            assert mask is not None
            assert (mask.dtype, mask.min_value, mask.has_empty_row) == (torch.float32, low, empty)
    mask = recorded(attn_mask=torch.full((46, 37), -5.0)).mask
    assert mask is not None
    assert (mask.min_value, mask.has_empty_row) == (-5.0, False)  # a bias, not a mask


def test_under_autocast_the_dtype_inside_is_recorded() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call = recorded(torch.float32, attn_mask=torch.zeros(46, 37))
    assert call.mask is not None
    assert (call.dtype, call.mask.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["math", "flash"])
def test_the_backends_of_a_cpu_are_right(name: str, dtype: torch.dtype) -> None:
    bias = torch.zeros(3, 1, 1, 37, dtype=dtype)
    bias[..., 20:] = torch.finfo(dtype).min
    for arguments in (
        {},
        {"is_causal": True, "scale": 0.4},
        {"attn_mask": padding_mask(empty=True)},
        {"attn_mask": padding_mask(empty=False).expand(3, 4, 46, 37)},
        {"attn_mask": bias},
    ):
        result = measure_backend_parity(recorded(dtype, **arguments), name)
        assert result.is_supported
        assert result.is_accurate, result
        assert set(result.errors) == {"out", "dq", "dk", "dv"}
        # The errors are measured, and not far below the tolerance that is set by them.
        assert TOLERANCE[dtype] / 200 < max(result.errors.values())


def test_the_seed_decides_the_draw() -> None:
    call = recorded()
    assert measure_backend_parity(call, "flash") == measure_backend_parity(call, "flash")
    assert measure_backend_parity(call, "flash") != measure_backend_parity(call, "flash", seed=1)


def test_one_key_has_no_gradient_to_compare_with_and_passes() -> None:
    layout = TensorLayout((3, 4, 1, 16), (64, 16, 16, 1))
    for dtype in TOLERANCE:
        assert measure_backend_parity(replace(recorded(dtype), key=layout, value=layout), "flash").is_accurate


def test_grouped_queries_and_a_wider_value_are_compared_too() -> None:
    call = recorded()
    assert measure_backend_parity(
        replace(
            call, key=call.key.keep_one_sample_and_few_heads(2), value=call.value.keep_one_sample_and_few_heads(2)
        ),
        "math",
    ).is_accurate
    wide = TensorLayout((3, 4, 37, 24), (37 * 24 * 4, 37 * 24, 24, 1))
    assert measure_backend_parity(replace(call, value=wide), "math").is_accurate
    shared = TensorLayout((3, 2, 37, 16), (37 * 32, 16, 32, 1))
    grouped = replace(call, key=shared, value=shared, enable_gqa=True)
    assert measure_backend_parity(grouped, "math").is_accurate
    assert measure_backend_parity(
        replace(grouped, key=call.key, value=call.value), "math"
    ).is_accurate  # groups of one

    def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        times = (1, q.shape[1] // k.shape[1], 1, 1)
        return F.scaled_dot_product_attention(q, k.repeat(times), v.repeat(times))

    result = measure_backend_parity(grouped, "math", attention=interleaved)
    assert result.is_finite
    assert not result.is_accurate


def test_a_backend_that_cannot_run_a_call_says_why_and_is_no_error() -> None:
    result = measure_backend_parity(recorded(), "cudnn")
    assert not result.is_supported
    assert not result.is_accurate
    assert "No viable backend" in result.reason


def test_one_sample_and_two_heads_keep_lengths_and_strides() -> None:
    captured_inputs: list[tuple[torch.Tensor, ...]] = []

    def attention(*qkv: torch.Tensor, **arguments: Any) -> torch.Tensor:
        captured_inputs.append((*qkv, arguments["attn_mask"]))
        return F.scaled_dot_product_attention(*qkv, **arguments)

    mask = padding_mask(empty=False).expand(3, 4, 46, 37)
    measure_backend_parity(recorded(attn_mask=mask), "math", attention=attention)
    query, key, _, mask = captured_inputs[0]
    assert (query.shape, query.stride()) == ((1, 2, 46, 16), (46 * 64, 16, 64, 1))
    assert (key.shape, mask.shape) == ((1, 2, 37, 16), (1, 2, 46, 37))
    assert mask.stride() == (37, 0, 0, 1)
    assert query.detach().std().item() == pytest.approx(1, rel=0.1)
    assert 0.4 < mask.float().mean().item() < 0.9


def test_the_reference_does_not_depend_on_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        recorded(is_causal=True),
        recorded(attn_mask=padding_mask(empty=True)),
        recorded(attn_mask=torch.rand(46, 37) > 0.5),
    ]
    results = [measure_backend_parity(call, "math") for call in calls]
    monkeypatch.setattr("dit_lora.guard.attention_backends._QUERIES_PER_CHUNK", 11)
    for call, result in zip(calls, results, strict=True):
        assert measure_backend_parity(call, "math").errors == pytest.approx(result.errors, rel=1e-3)


def masked_softmax(query: torch.Tensor, key: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Probabilities in fp32; NaN in a row that is masked altogether, as a plain softmax gives."""
    logits = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    mask = arguments["attn_mask"]
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return logits.softmax(-1)


def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> Any:
    return (masked_softmax(query, key, **arguments) @ value.float()).to(query.dtype)


def test_a_backend_that_gives_nan_for_an_empty_row_is_found_and_only_where_there_is_one() -> None:
    result = measure_backend_parity(recorded(attn_mask=padding_mask(empty=True)), "math", attention=eager)
    assert result.is_supported
    assert not result.is_finite
    assert not result.is_accurate
    assert measure_backend_parity(recorded(attn_mask=padding_mask(empty=False)), "math", attention=eager).is_accurate
    layout = TensorLayout((3, 4, 1, 16), (64, 16, 16, 1))
    mask = AttentionMaskLayout(TensorLayout((46, 1), (1, 1)), torch.bool, min_value=0.0, has_empty_row=False)
    call = replace(recorded(), key=layout, value=layout, mask=mask)
    assert measure_backend_parity(call, "math", attention=eager).is_accurate


class Recomputed(torch.autograd.Function):
    """Softmax whose backward recomputes probabilities from the stored logsumexp, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, together: bool) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.together = together
        return logits.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,), (grad,) = ctx.saved_tensors, grads
        total = logits.logsumexp(-1, keepdim=True)
        p = (logits - total).exp() if ctx.together else logits.exp() * (-total).exp()
        return p * (grad - (p * grad).sum(-1, keepdim=True)), None


def recomputing(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    together: bool,
    **arguments: Any,
) -> torch.Tensor:
    logits = query @ key.mT * (arguments["scale"] or query.shape[-1] ** -0.5)
    mask = arguments["attn_mask"]
    return Recomputed.apply(logits if mask is None else logits + mask, together) @ value


def test_a_backward_pass_that_overflows_at_low_logits_is_found() -> None:
    """exp(-logsumexp) is Inf below -88.7: the cuDNN defect of pytorch#196678."""
    for call in (recorded(), recorded(scale=0.02)):
        result = measure_backend_parity(call, "math", attention=partial(recomputing, together=False))
        assert math.isfinite(result.errors["out"])
        assert not math.isfinite(result.errors["dq"])
        assert measure_backend_parity(call, "math", attention=partial(recomputing, together=True)).is_accurate


def test_a_row_of_the_lowest_number_shows_a_backward_pass_that_loses_its_logarithm() -> None:
    """min + log(S) rounds to min, so every probability comes out as 1: flash on the CPU in torch 2.13."""
    attention = partial(recomputing, together=True)
    for empty, is_expected in ((False, True), (True, False)):
        low = torch.finfo(torch.float32).min
        mask = torch.zeros(3, 1, 1, 37).masked_fill(~padding_mask(empty=empty), low)
        assert measure_backend_parity(recorded(attn_mask=mask), "math", attention=attention).is_accurate is is_expected


def wrong_row(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[..., 1:2, :], out[..., 1:, :]], -2)


def one_gradient_missing(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[..., :-1, :], out[..., -1:, :].detach()], -2)


def swapped_heads(out: torch.Tensor) -> torch.Tensor:
    return out.flip(1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("spoil", [wrong_row, one_gradient_missing, swapped_heads])
def test_a_backend_that_is_wrong_in_one_place_is_found(
    spoil: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    def attention(*qkv: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return spoil(F.scaled_dot_product_attention(*qkv, **arguments))

    result = measure_backend_parity(recorded(dtype), "math", attention=attention)
    assert result.is_finite
    assert not result.is_accurate


def no_mask(*qkv: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*qkv, **{**arguments, "attn_mask": None})


def no_scale(*qkv: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*qkv, **{**arguments, "scale": None})


def not_causal(*qkv: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*qkv, **{**arguments, "is_causal": False})


@pytest.mark.parametrize(
    ("attention", "arguments"),
    [
        (no_mask, {"attn_mask": padding_mask(empty=False)}),
        (no_scale, {"scale": 0.3}),
        (not_causal, {"is_causal": True}),
    ],
)
def test_an_argument_that_is_not_heeded_is_found(attention: Attention, arguments: dict[str, Any]) -> None:
    assert not measure_backend_parity(recorded(torch.bfloat16, **arguments), "math", attention=attention).is_accurate


def test_a_backend_that_raises_anything_else_is_available_and_wrong() -> None:
    def attention(*qkv: torch.Tensor, **_: Any) -> torch.Tensor:
        raise RuntimeError("cuDNN Frontend error: no execution plan")

    result = measure_backend_parity(recorded(), "math", attention=attention)
    assert result.is_supported
    assert not result.is_accurate
    assert "no execution plan" in str(result)


def test_too_little_memory_is_not_a_wrong_result() -> None:
    def attention(*qkv: torch.Tensor, **_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not measure_backend_parity(recorded(), "math", attention=attention).is_supported


def test_fp32_is_held_to_what_the_matmul_precision_allows() -> None:
    call = recorded()
    assert call.tolerance == TOLERANCE[torch.float32]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert call.tolerance == TOLERANCE[torch.float16]
        assert recorded(torch.bfloat16).tolerance == TOLERANCE[torch.bfloat16]
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast_and_no_grad_around_it_change_nothing() -> None:
    call = recorded()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert measure_backend_parity(call, "math") == measure_backend_parity(call, "math")
        assert measure_backend_parity(call, "math").is_accurate


@pytest.fixture
def cudnn_allowed() -> Iterator[None]:
    """A run in this process has switched it off."""
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    yield
    cuda.enable_cudnn_sdp(was_enabled)


@pytest.mark.usefixtures("cudnn_allowed")
def test_only_chooses_one_and_gives_back() -> None:
    def allowed() -> dict[str, bool]:
        return {
            "flash": cuda.flash_sdp_enabled(),
            "efficient": cuda.mem_efficient_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        }

    before = allowed()
    assert all(before.values())
    for name in BACKENDS:
        with use_only_backend(name):
            assert allowed() == {backend_name: backend_name == name for backend_name in BACKENDS}
    assert allowed() == before
