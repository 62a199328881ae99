"""Layers with a frozen adapter under the trained one: `lora_linear` for that one, PEFT's modules for the rest."""

import copy
import warnings

import peft
import pytest
import torch
from lora_layers import BF16, Attention, assert_close, build, counted, fused, inputs, step

from dit_lora.fuse import lora


def with_under(dtype: torch.dtype = torch.float32, *, trained: tuple[str, ...] = ("default",)) -> Attention:
    """Frozen adapters of other ranks, scales and layers; one of them on a layer that the other has not."""
    model = build(dtype)
    for number, targets in enumerate((["q", "k", "out"], ["q", "v"])):
        config = peft.LoraConfig(r=2 + number, lora_alpha=5, target_modules=targets, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's: that there is one already
            peft.inject_adapter_in_model(config, model, f"under_{number}")
    for layer in (model.q, model.k, model.v, model.out):
        layer._active_adapter = ["default", "under_0", "under_1"]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        parameter.requires_grad_("lora_" in name and any(f".{adapter_name}." in name for adapter_name in trained))
    return model


@pytest.mark.parametrize("shared", [True, False])
def test_values_and_gradients_are_pefts(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = with_under()
    model = copy.deepcopy(stock)
    stock.shared = model.shared = shared
    fused(model)
    x = inputs().detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not x.is_contiguous()
    assert all(lora.find_lora_problem(layer) is None for layer in (model.q, model.k, model.v, model.out))
    with counted(monkeypatch) as calls:
        ours = step(model, x)
    assert calls == ([3, 1] if shared else [1, 1, 1, 1])
    assert_close(ours, step(stock, x))
    assert len(ours) == 2 + 8  # nothing of what is frozen has a gradient
    off = copy.deepcopy(stock)
    for layer in (off.q, off.k, off.v, off.out):
        layer._active_adapter = ["default"]
    assert (step(off, x)[0] - ours[0]).abs().max() > 0.1


def test_in_bf16_it_is_no_further_from_fp64_than_peft_is() -> None:
    stock = with_under(BF16).eval()
    exact = copy.deepcopy(stock).double()
    model = copy.deepcopy(stock)
    fused(model)
    with torch.autocast("cpu", BF16):
        theirs, ours = step(stock, inputs(BF16)), step(model, inputs(BF16))
    true = step(exact, inputs(BF16).detach().double().requires_grad_())
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    for mine, their, right in zip(ours, theirs, true, strict=True):
        error, stock_error = ((value.double() - right).norm() for value in (mine, their))
        assert error <= 1.3 * stock_error


def test_which_one_trains_must_be_clear() -> None:
    for trained in ((), ("default", "under_0")):
        model = with_under(trained=trained)
        assert lora.find_lora_problem(model.q) == "3 active adapters"
