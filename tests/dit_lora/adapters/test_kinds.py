"""Every kind starts as the base bit for bit and gives PEFT's weight; combinations that cannot work are refused."""

from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, attach_lora
from dit_lora.adapters.changed_weight import get_weight_changes
from dit_lora.config.lora import ADAPTER_KINDS, LoraConfig
from dit_lora.errors import DitLoraError

OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 3, "alpha": 5, "rslora": True},
    "dora": {"rank": 3, "alpha": 5},
    "lokr": {"rank": 1, "alpha": 3, "factor": 2},
    "loha": {"rank": 3, "alpha": 5},
    "oft": {"block_size": 3},
}
"""LoKr's second factor is a product at this rank."""


class Net(nn.Module):
    """A convolution and two linear layers, of odd sides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 7, 3, stride=2, padding=1)
        self.wide, self.tall = nn.Linear(7, 21), nn.Linear(21, 33, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.tall(torch.tanh(self.wide(self.conv(x).flatten(2).mT)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().requires_grad_(False)


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 9, 11, 5, generator=generator).movedim(-1, 1)


def attached(model: nn.Module, kind: Any) -> nn.Module:
    targets = ("wide", "tall", *(() if kind == "oft" else ("conv",)))
    attach_lora(model, LoraConfig(kind=kind, **OPTIONS[kind]), targets, seed=0)
    return model


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_it_is_the_base_before_the_first_step(kind: str) -> None:
    """Over bf16 too, whose norms PEFT would round where its forward pass does not."""
    for dtype in (torch.float32, torch.bfloat16):
        base, model = net().to(dtype), attached(net().to(dtype), kind)
        x = inputs().to(dtype)
        assert torch.equal(model(x), base(x)), dtype
        assert all(p.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


def test_doras_magnitudes_are_the_rows_norms_in_fp32() -> None:
    model = attached(net().bfloat16(), "dora")
    for name in ("conv", "wide", "tall"):
        layer: Any = model.get_submodule(name)
        weight = layer.get_base_layer().weight.double().flatten(1)
        magnitude = layer.lora_magnitude_vector[ADAPTER_NAME].weight.double().flatten()
        torch.testing.assert_close(magnitude, weight.norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_the_changed_weight_is_what_peft_computes_with(kind: str) -> None:
    model = attached(net(), kind)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.double()
    expected, plain = model(inputs().double()), net().double()
    with torch.no_grad():
        for name, change in get_weight_changes(model, ADAPTER_NAME).items():
            weight = plain.get_submodule(name).weight
            weight.copy_(change.apply_to_weight(weight.clone()))
    # PEFT's scale of LoHa is an fp32 tensor.
    torch.testing.assert_close(plain(inputs().double()), expected, rtol=1e-6, atol=1e-7)
    assert (net().double()(inputs().double()) - expected).abs().max() > 0.05


def zero_rows(model: Net) -> None:
    with torch.no_grad():
        model.wide.weight[[2, 9]] = 0


@pytest.mark.parametrize(
    ("options", "targets", "words"),
    [
        ({"kind": "oft"}, ("conv",), r"oft cannot adapt.*\n.*conv: a convolution"),
        (
            {"kind": "dora"},
            ("wide", "tall"),
            r"dora cannot adapt.*\n.*wide: 2 of its 21 rows are zero",
        ),
        (
            {"rank_pattern": {"wide": 2, "nothing": 3}},
            ("wide",),
            r"match no adapted.*\n.*rank_pattern: nothing$",
        ),
        ({"alpha_pattern": {"tall": 2}}, ("wide",), r"match no adapted.*\n.*alpha_pattern: tall"),
        ({"rank_pattern": {"wide(": 2}}, ("wide",), r"'wide\(' is not a valid regular expression"),
    ],
)
def test_what_cannot_be_adapted_so_is_refused_by_name(
    options: dict[str, Any], targets: tuple[str, ...], words: str
) -> None:
    model = net()
    zero_rows(model)
    with pytest.raises(DitLoraError, match=words):
        attach_lora(model, LoraConfig(**options), targets, seed=0)


def test_ranks_and_alphas_by_pattern_and_root() -> None:
    model = net()
    lora = LoraConfig(rank=4, alpha=8, rslora=True, rank_pattern={"ta.l": 9}, alpha_pattern={"wide": 2})
    attach_lora(model, lora, ("wide", "tall"), seed=0)
    ranks = {
        name: (m.r[ADAPTER_NAME], m.scaling[ADAPTER_NAME]) for name, m in (("wide", model.wide), ("tall", model.tall))
    }
    assert ranks == {"wide": (4, 2 / 4**0.5), "tall": (9, 8 / 9**0.5)}
