"""One call for all attention: masks never meet cuDNN, full masks vanish, and a chosen backend is scoped."""

from typing import Any

import pytest
import torch
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention

from dit_lora.errors import DitLoraError
from dit_lora.fuse import attention
from dit_lora.fuse.attention import TRAINABLE, attend, require_backend
from dit_lora.fuse.core import Fusion


def heads(tokens: int = 7, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator(device).manual_seed(0)
    size = (2, tokens, 3, 8)
    return (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", [None, "native", "_native_math"])
def test_it_is_pytorchs_attention(backend: str | None, masked: bool) -> None:
    query, key, value = heads()
    mask = torch.rand(2, 1, 7, 7) > 0.3 if masked else None
    found = attend(query, key, value, mask, Fusion({}, backend))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, expected)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("masked", [False, True])
def test_with_a_mask_cudnn_is_off_and_afterwards_as_before(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cuda.cudnn_sdp_enabled()
    seen = []

    def dispatched(*_args: Any, **_kwargs: Any) -> None:
        seen.append(cuda.cudnn_sdp_enabled())
        raise RuntimeError("as a backend may")

    monkeypatch.setattr(attention, "dispatch_attention_fn", dispatched)
    cuda.enable_cudnn_sdp(True)
    try:
        mask = torch.ones(2, 1, 7, 7).as_subclass(OnGpu) if masked else None
        with pytest.raises(RuntimeError, match="as a backend may"):
            attend(*heads(), mask, Fusion({}))
        assert seen == [not masked]
        assert cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_mask_that_breaks_cudnns_backward_is_no_danger() -> None:
    """pytorch issue 196678: length 64 modulo 128, and rows whose log of summed exponentials is below -88.7."""
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    try:
        query, key, value = (x.requires_grad_() for x in heads(192, "cuda", torch.bfloat16))
        mask = torch.full((2, 1, 192, 192), -200.0, device="cuda", dtype=torch.bfloat16)
        mask[..., 96:, :] = 0.0
        attend(query, key, value, mask, Fusion({})).float().square().sum().backward()
        for tensor in (query, key, value):
            assert torch.isfinite(tensor.grad).all()
    finally:
        cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("name", ["sage", "aiter_fa2_hub", "flash3", ""])
def test_backends_without_a_backward_are_refused_with_those_that_have_one(name: str) -> None:
    with pytest.raises(DitLoraError, match=f"kernels.attention: {name} does not train") as error:
        require_backend(name)
    assert all(known in str(error.value) for known in TRAINABLE)


def test_a_backend_that_is_not_installed_is_refused_with_what_is_missing() -> None:
    with pytest.raises(DitLoraError, match=r"xformers cannot be used here.*install"):
        require_backend("xformers")


def test_every_backend_that_is_offered_is_one_of_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert set(TRAINABLE) <= {backend.value for backend in AttentionBackendName}
