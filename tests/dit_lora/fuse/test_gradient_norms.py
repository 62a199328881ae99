"""Gradient norms by the kernel: the same as PyTorch's, or not used."""

from collections.abc import Sequence

import pytest
import torch

from dit_lora.errors import DitLoraError
from dit_lora.fuse import gradient_norms as norms
from dit_lora.fuse.gradient_norms import choose_norm_function
from dit_lora.training.optim.build import compute_gradient_norms
from dit_lora_kernels import triton_support


@pytest.fixture
def trained() -> list[torch.nn.Parameter]:
    shapes = ((5, 3), (7,), (2, 3, 4))
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def wrong(tensors: Sequence[torch.Tensor], groups: Sequence[int], count: int) -> torch.Tensor:
    """Leaves the last element of each tensor out."""
    return norms.finite_norms_reference([t.flatten()[:-1] for t in tensors], groups, count)


def hides_inf(tensors: Sequence[torch.Tensor], groups: Sequence[int], count: int) -> torch.Tensor:
    return norms.finite_norms_reference([t.nan_to_num(posinf=0) for t in tensors], groups, count)


def test_on_is_the_kernel_and_gives_the_same_norms_by_group(
    trained: list[torch.nn.Parameter],
) -> None:
    chosen, reason = choose_norm_function("on", trained)
    assert reason is None
    for parameter in trained:
        parameter.grad = torch.randn(parameter.shape)
    groups = [
        {"name": "adapter", "params": trained[:2]},
        {"name": "backbone", "params": trained[2:]},
    ]
    actual, expected = compute_gradient_norms(groups, chosen), compute_gradient_norms(groups)
    assert list(actual) == list(expected) == ["adapter", "backbone"]
    for name, norm in expected.items():
        torch.testing.assert_close(actual[name], norm)
    trained[2].grad[1, 1, 1] = torch.nan
    actual = compute_gradient_norms(groups, chosen)
    assert torch.isfinite(actual["adapter"])
    assert not torch.isfinite(actual["backbone"])


def test_groups_without_gradients_have_norm_zero(trained: list[torch.nn.Parameter]) -> None:
    chosen, _ = choose_norm_function("on", trained)
    groups = [{"name": "adapter", "params": trained}, {"name": "none", "params": []}]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    for actual in (compute_gradient_norms(groups, chosen), compute_gradient_norms(groups)):
        assert actual["adapter"].item() == pytest.approx(46**0.5)
        assert actual["none"].item() == 0.0


def test_off_is_pytorch(trained: list[torch.nn.Parameter]) -> None:
    assert choose_norm_function("off", trained) == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_auto_needs_a_gpu_and_says_so(trained: list[torch.nn.Parameter]) -> None:
    assert choose_norm_function("auto", trained) == (None, triton_support().reason)


@pytest.mark.parametrize(
    ("kernel", "words"), [(wrong, "its norms are .*, and those of PyTorch"), (hides_inf, "Inf .* not seen")]
)
def test_a_kernel_that_differs_is_refused_if_asked_for_and_left_if_not(
    trained: list[torch.nn.Parameter], monkeypatch: pytest.MonkeyPatch, kernel: object, words: str
) -> None:
    monkeypatch.setattr(norms, "finite_norms", kernel)
    with pytest.raises(DitLoraError, match=rf"kernels.finite_norm: .*{words}.*set it to auto or off"):
        choose_norm_function("on", trained)
    gpu = type(triton_support())("gpu", "as if")
    monkeypatch.setattr(norms, "triton_support", lambda: gpu)
    chosen, reason = choose_norm_function("auto", trained)
    assert chosen is None
    assert reason is not None
