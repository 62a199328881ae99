"""PiSSA and OLoRA start as PEFT's do and train as PEFT's do, over a base that stays as it is."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.start import (
    START_ADAPTER,
    attach_initialized_lora,
    build_adapter_state_for_saving,
    build_config_for_saving,
)
from dit_lora.adapters.under import disable_frozen_adapters, disable_trained_adapter
from dit_lora.config.lora import LoraConfig
from dit_lora.errors import DitLoraError

RANK = 5


class Net(nn.Module):
    """Two linear layers of other sides."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Linear(33, 20), nn.Linear(20, 41, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.tall(torch.tanh(self.wide(x)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().requires_grad_(False)


def inputs() -> torch.Tensor:
    return torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(1)).transpose(0, 1)


def started(net: nn.Module, init: str, **options: Any) -> Any:
    model = copy.deepcopy(net)
    lora = LoraConfig(init=init, rank=RANK, alpha=8, **options)
    attach_initialized_lora(model, lora, ("wide", "tall"), seed=3)
    return model


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_it_starts_as_the_base_with_the_part_of_the_weight_that_the_paper_takes(init: str, net: Any) -> None:
    model = started(net, init)
    torch.testing.assert_close(model(inputs()), net(inputs()), rtol=1e-5, atol=1e-6)
    for name in ("wide", "tall"):
        layer, weight = getattr(model, name), getattr(net, name).weight.double()
        assert torch.equal(layer.base_layer.weight, getattr(net, name).weight)
        a, b = (matrix[ADAPTER_NAME].weight.double() for matrix in (layer.lora_A, layer.lora_B))
        part = layer.scaling[ADAPTER_NAME] * (b @ a)
        if init == "pissa":
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            expected = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
            torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-4)
        else:
            torch.testing.assert_close(b.T @ b, torch.eye(RANK, dtype=b.dtype), rtol=0, atol=1e-5)
            torch.testing.assert_close(a, b.T @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_values_and_gradients_are_those_of_pefts_own_start(init: str, net: Any) -> None:
    """PEFT takes the part out of the base; ours takes it back beside it."""
    model, peft_model = started(net, init), copy.deepcopy(net)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=8,
        target_modules=["wide", "tall"],
        init_lora_weights=init,  # type: ignore[arg-type]
    )
    peft.inject_adapter_in_model(config, peft_model)
    torch.manual_seed(7)
    step = {name: 0.1 * torch.randn(p.shape) for name, p in trained(model).items()}
    with torch.no_grad():
        for name, p in trained(peft_model).items():
            p.copy_(trained(model)[name])  # a singular vector's sign is free
        for lora_model in (model, peft_model):
            for name, p in trained(lora_model).items():
                p += step[name]
    target = torch.randn(7, 3, 41)
    for lora_model in (model, peft_model):
        ((lora_model(inputs()) - target) ** 2).mean().backward()
    torch.testing.assert_close(model(inputs()), peft_model(inputs()), rtol=1e-4, atol=1e-5)
    parameters = trained(model)
    assert parameters.keys() == trained(peft_model).keys()
    for name, p in trained(peft_model).items():
        torch.testing.assert_close(parameters[name].grad, p.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_saved_is_one_lora_over_the_untouched_base(rslora: bool, net: Any) -> None:
    model = started(net, "pissa", rslora=rslora, rank_pattern={"tall": 3})
    with torch.no_grad():
        for p in trained(model).values():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    state = build_adapter_state_for_saving(model, peft.get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME))
    config = build_config_for_saving(model, ADAPTER_NAME)
    assert (config.r, config.rank_pattern, config.use_rslora) in (
        (2 * RANK, {"^tall": 6}, False),
        (6, {"^wide": 2 * RANK}, False),
    )
    peft_model = copy.deepcopy(net)
    peft.inject_adapter_in_model(config, peft_model)
    peft.set_peft_model_state_dict(peft_model, state)
    torch.testing.assert_close(peft_model(inputs()), model(inputs()), rtol=1e-5, atol=1e-6)
    assert (model(inputs()) - net(inputs())).abs().max() > 0.05


def test_the_start_is_on_wherever_what_trains_is_and_only_there(net: Any) -> None:
    model = started(net, "pissa", dropout=0.5)
    model.train()
    assert all(".default." in name for name in trained(model))
    drops = {type(layer.lora_dropout[START_ADAPTER]) for layer in (model.wide, model.tall)}
    assert drops == {nn.Identity}  # it takes back what is there, dropped or not
    model.eval()
    with torch.no_grad():
        for p in trained(model).values():
            p += 0.1
    output = model(inputs())
    with disable_frozen_adapters(model):
        assert torch.equal(model(inputs()), output)
    with disable_trained_adapter(model):
        assert torch.equal(model(inputs()), net(inputs()))
    assert torch.equal(model(inputs()), output)


def test_a_rank_that_a_weight_has_not_is_refused_by_its_layer(net: Any) -> None:
    model = copy.deepcopy(net)
    lora = LoraConfig(init="olora", rank=21)
    with pytest.raises(DitLoraError, match=r"olora needs a rank.*\n.*wide: rank 21, and its weight has 20"):
        attach_initialized_lora(model, lora, ("wide", "tall"), seed=0)
