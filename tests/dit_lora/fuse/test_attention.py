"""One call for all attention: masks never meet cuDNN, full masks vanish, and a chosen backend is scoped."""

import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import Attention
from kernel_checks import saved_bytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import cuda
from torch.library import CustomOpDef, custom_op
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dit_lora.errors import DitLoraError
from dit_lora.fuse import attention
from dit_lora.fuse.attention import (
    MASKLESS_BACKENDS,
    TRAINABLE_BACKENDS,
    RecomputableTensor,
    attend,
    project_output,
    require_backend,
    reshape_mask,
)
from dit_lora.guard.fallbacks import find_fallback, list_attention_fallbacks


def heads(tokens: int = 7, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator(device).manual_seed(0)
    size = (2, tokens, 3, 8)
    return (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", [None, "native", "_native_math"])
def test_it_is_pytorchs_attention(backend: str | None, masked: bool) -> None:
    query, key, value = heads()
    mask = torch.rand(2, 1, 7, 7) > 0.3 if masked else None
    actual = attend(query, key, value, mask, backend)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(actual, expected)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


SETTERS = {
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}


def enabled() -> set[str]:
    return {name for name, (is_on, _) in SETTERS.items() if is_on()}


@pytest.fixture
def backends() -> Iterator[None]:
    """All of PyTorch's backends on within the test, and afterwards as before."""
    before = enabled()
    for _, enable in SETTERS.values():
        enable(True)
    yield
    for name, (_, enable) in SETTERS.items():
        enable(name in before)


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("off", [(), ("flash",), ("efficient", "cudnn")])
@pytest.mark.parametrize("masked", [False, True])
def test_with_a_mask_cudnn_is_off_what_was_off_stays_so_and_afterwards_all_is_as_before(
    masked: bool, off: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def dispatched(*_args: Any, **_kwargs: Any) -> None:
        recorded.append(enabled())
        raise RuntimeError("as a backend may")

    monkeypatch.setattr(attention, "dispatch_attention_fn", dispatched)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", dispatched)
    for name in off:
        SETTERS[name][1](False)
    patched_attributes = set(SETTERS) - set(off)
    mask = torch.ones(2, 1, 7, 7).as_subclass(OnGpu) if masked else None
    with pytest.raises(RuntimeError, match="as a backend may"):
        attend(*heads(), mask, None)
    assert recorded == [patched_attributes - {"cudnn"} if masked else patched_attributes]
    assert enabled() == patched_attributes


@pytest.mark.parametrize("name", [None, "native", "_native_math"])
def test_pytorchs_attention_is_called_past_the_dispatcher_and_no_other(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatched = []
    dispatch = attention.dispatch_attention_fn

    def noted(*args: Any, **kwargs: Any) -> Any:
        dispatched.append(kwargs["backend"])
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(attention, "dispatch_attention_fn", noted)
    query, key, value = heads()
    actual = attend(query, key, value, None, name)
    assert len(dispatched) == (name == "_native_math")
    torch.testing.assert_close(actual, dispatch(query, key, value))
    # What Diffusers' own context asks for is asked for here too, and its checks are made.
    with attention_backend("_native_math"):
        attend(query, key, value, None, None)
    assert len(dispatched) == 1 + (name == "_native_math")
    monkeypatch.setattr(attention.Registry, "_checks_enabled", True)
    attend(query, key, value, None, None)
    assert len(dispatched) == 2 + (name == "_native_math")


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_dropout_that_drops_nothing_is_called_for_whoever_looks(rate: float, everywhere: bool) -> None:
    attn = Attention(query_dim=24, heads=3, dim_head=8, dropout=rate)
    attended, recorded = torch.randn(2, 7, 24), []

    def look(module: torch.nn.Module, *_: Any) -> None:
        recorded.append(module)

    stock = attn.to_out[1]
    torch.manual_seed(0)
    expected = stock(attn.to_out[0](attended))
    torch.manual_seed(0)
    assert torch.equal(project_output(attn, attended), expected)
    hook = torch.nn.modules.module.register_module_forward_hook if everywhere else stock.register_forward_hook
    handle = hook(look)
    try:
        project_output(attn, attended)
    finally:
        handle.remove()
    assert stock in recorded


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_blocks_mask_is_kept_once_where_all_heads_share_it(per_head: bool, queries: int) -> None:
    """Stock processors repeat it for each head; the attended tokens are the same."""
    attn = Attention(query_dim=24, heads=3, dim_head=8)
    generator = torch.Generator().manual_seed(0)
    mask = torch.where(torch.rand(2, queries, 7, generator=generator) < 0.6, 0.0, -1e4)
    mask[..., 0] = 0.0
    stock = attn.prepare_attention_mask(mask, 7, 2)
    actual = reshape_mask(attn, stock if per_head else mask, torch.empty(2, 7, 24))
    assert actual is not None
    assert actual.shape == (2, 3 if per_head else 1, queries, 7)
    assert torch.equal(actual.expand(2, 3, -1, -1), stock.view(2, 3, queries, 7))


def test_a_compiled_block_with_a_mask_on_cuda_has_no_graph_break() -> None:
    """Tensors that say that they are on a GPU, without values: what Dynamo traces is what it would there."""
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 7, 3, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        mask = torch.empty(2, 1, 1, 7, device="cuda", dtype=torch.bfloat16)
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        assert compiled(query, key, value, mask, None).shape == query.shape
    torch._dynamo.reset()


@pytest.mark.usefixtures("backends")
def test_what_the_guard_switches_off_is_off_in_a_compiled_block_with_a_mask() -> None:
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with FakeTensorMode():
        query, key, value = (torch.empty(2, 7, 3, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        mask = torch.empty(2, 1, 1, 7, device="cuda", dtype=torch.bfloat16)
        compiled = torch.compile(attend, backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(query, key, value, mask, None)
        find_fallback(list_attention_fallbacks(), "attention:flash").disable()
        compiled(query, key, value, mask, None)
    assert ["FLASH" in graph for graph in graphs] == [True, False]
    assert all("EFFICIENT" in graph for graph in graphs)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.usefixtures("backends")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_mask_that_breaks_cudnns_backward_is_no_danger() -> None:
    """pytorch issue 196678: length 64 modulo 128, and rows whose log of summed exponentials is below -88.7."""
    query, key, value = (x.requires_grad_() for x in heads(192, "cuda", torch.bfloat16))
    mask = torch.full((2, 1, 192, 192), -200.0, device="cuda", dtype=torch.bfloat16)
    mask[..., 96:, :] = 0.0
    attend(query, key, value, mask, None).float().square().sum().backward()
    for tensor in (query, key, value):
        assert torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("name", ["sage", "aiter_fa2_hub", "flash3", "_flash_3", ""])
def test_backends_without_a_backward_are_refused_with_those_that_have_one(name: str) -> None:
    with pytest.raises(DitLoraError, match=f"kernels.attention: {name} does not support training") as error:
        require_backend(name)
    assert all(backend_name in str(error.value) for backend_name in TRAINABLE_BACKENDS)


def test_a_backend_that_is_not_installed_is_refused_with_what_is_missing() -> None:
    with pytest.raises(DitLoraError, match=r"xformers cannot be used here.*install"):
        require_backend("xformers")


def test_every_backend_that_is_offered_is_one_of_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert set(TRAINABLE_BACKENDS) <= {backend.value for backend in AttentionBackendName}


def test_diffusers_operator_of_flash_attention_3_still_has_no_backward() -> None:
    """Once it has one, `_flash_3` may be offered: the package is then called with its own backward."""
    from diffusers.models.attention_dispatch import _wrapped_flash_attn_3

    assert isinstance(_wrapped_flash_attn_3, CustomOpDef)
    assert _wrapped_flash_attn_3._backward_fn is None
    op_without_backward = custom_op("dit_lora_test::bare", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        op_without_backward(torch.ones(2, requires_grad=True)).sum().backward()


def test_backends_that_take_no_mask_are_those_of_diffusers_that_refuse_one() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backends = _AttentionBackendRegistry._backends
    sources = {n: inspect.getsource(backends[AttentionBackendName(n)]) for n in TRAINABLE_BACKENDS}
    refusing = {n for n, source in sources.items() if "`attn_mask` is not supported" in source}
    assert set(MASKLESS_BACKENDS) == refusing


@pytest.mark.parametrize("name", MASKLESS_BACKENDS)
def test_a_mask_for_a_backend_that_takes_none_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(DitLoraError, match=f"kernels.attention: {name} does not support masks") as error:
        attend(*heads(), torch.rand(2, 1, 7, 7) > 0.3, name)
    assert "\n" not in str(error.value)


class Scale(torch.autograd.Function):
    """Multiplies by a weight, and saves its input in another shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.flatten(0, 1), weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad.flatten(0, 1) * x).sum(0)


def test_what_is_computed_again_is_freed_and_has_the_same_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(2, 3, 4, generator=generator, requires_grad=True)
    weight = torch.randn(4, generator=generator, requires_grad=True)
    calls = []

    def make() -> torch.Tensor:
        calls.append(1)
        return source.sin()

    def step(*, kept: bool) -> tuple[weakref.ref[torch.Tensor], torch.Tensor]:
        normed = make()
        with nullcontext() if kept else RecomputableTensor(normed, make).skip_saving_activation():
            return weakref.ref(normed), Scale.apply(normed, weight)

    outputs = []
    for keep_masks in (True, False):
        reference, y = step(kept=keep_masks)
        gc.collect()
        assert keep_masks or reference() is None
        calls.clear()
        outputs.append(torch.autograd.grad(y.square().sum(), [source, weight]))
        assert len(calls) == (0 if keep_masks else 1)
    assert all(map(torch.equal, *outputs))


def test_under_checkpointing_nothing_is_computed_twice_for_it() -> None:
    """It decides which tensors stay alive; a closure of ours would hold its inputs longer."""
    source, weight = torch.randn(2, 3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        normed = x.sin()
        with RecomputableTensor(normed, lambda: calls.append(2) or x.sin()).skip_saving_activation():
            return Scale.apply(normed, weight)

    checkpoint(block, source, use_reentrant=False).sum().backward()
    assert calls == [1, 1]


def test_counting_hooks_see_what_is_saved_beside_it() -> None:
    normed, weight = torch.randn(2, 300, 4), torch.ones(4, requires_grad=True)

    def run() -> torch.Tensor:
        with RecomputableTensor(normed, normed.clone).skip_saving_activation():
            return Scale.apply(normed, weight)

    assert saved_bytes(run) == weight.nbytes
