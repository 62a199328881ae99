"""Parameter groups: own learning rates, nothing left out, nothing matched by accident."""

import pytest
import torch
from torch import nn

import dit_lora
from dit_lora.adapters.groups import get_base_parameters
from dit_lora.config.optim import GroupConfig
from dit_lora.errors import DitLoraError

PATTERNS = {"connector": ("embed.*", "out.*"), "backbone": ("blocks.*",)}


class LoraLinear(nn.Module):
    """The parameter names that PEFT gives a wrapped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 3)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})


@pytest.fixture
def model() -> nn.Module:
    model = nn.ModuleDict(
        {
            "embed": nn.Linear(3, 3),
            "blocks": nn.ModuleList([nn.ModuleDict({"to_q": LoraLinear(), "norm": nn.LayerNorm(3)})]),
            "out": nn.Linear(3, 3),
        }
    ).to(torch.bfloat16)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model


def names(groups: list[dict], group: str) -> set[str]:
    return set(next(g["param_names"] for g in groups if g["name"] == group))


def test_adapter_alone_leaves_the_base_frozen(model: nn.Module) -> None:
    groups = dit_lora.parameter_groups(model, adapter=1e-4)
    assert [g["name"] for g in groups] == ["adapter"]
    assert groups[0]["lr"] == 1e-4
    assert names(groups, "adapter") == {
        "blocks.0.to_q.lora_A.default.weight",
        "blocks.0.to_q.lora_B.default.weight",
    }
    assert not get_base_parameters(model)


def test_four_groups_share_out_every_parameter_once(model: nn.Module) -> None:
    groups = dit_lora.parameter_groups(
        model, adapter=1e-4, adapter_b=1.6e-3, connector=1e-5, backbone=1e-6, patterns=PATTERNS
    )
    members = [name for g in groups for name in g["param_names"]]
    assert sorted(members) == sorted(name for name, _ in model.named_parameters())
    assert names(groups, "adapter_b") == {"blocks.0.to_q.lora_B.default.weight"}
    assert names(groups, "connector") == {"embed.weight", "embed.bias", "out.weight", "out.bias"}
    assert "blocks.0.to_q.base_layer.weight" in names(groups, "backbone")
    assert {g["name"]: g["lr"] for g in groups} == {
        "adapter": 1e-4,
        "adapter_b": 1.6e-3,
        "connector": 1e-5,
        "backbone": 1e-6,
    }


def test_base_weights_that_train_become_fp32_and_only_they(model: nn.Module) -> None:
    dit_lora.parameter_groups(model, adapter=1e-4, connector=1e-5, patterns=PATTERNS)
    for name, parameter in model.named_parameters():
        is_trainable = ".lora_" in name or name.startswith(("embed", "out"))
        assert parameter.requires_grad == is_trainable
        assert parameter.dtype is (torch.float32 if is_trainable else torch.bfloat16)
    assert set(get_base_parameters(model)) == {
        "embed.weight",
        "embed.bias",
        "out.weight",
        "out.bias",
    }


def test_backbone_without_patterns_is_every_base_weight(model: nn.Module) -> None:
    groups = dit_lora.parameter_groups(model, adapter=1e-4, backbone=1e-6)
    assert "embed.weight" in names(groups, "backbone")
    assert "blocks.0.norm.weight" in names(groups, "backbone")


def test_a_groups_own_patterns_win(model: nn.Module) -> None:
    groups = dit_lora.parameter_groups(
        model,
        adapter=1e-4,
        connector=GroupConfig(lr=1e-5, modules=("out.bias",)),
        patterns=PATTERNS,
    )
    assert names(groups, "connector") == {"out.bias"}


def test_the_connector_comes_before_a_backbone_without_patterns(model: nn.Module) -> None:
    groups = dit_lora.parameter_groups(
        model, adapter=1e-4, connector=1e-5, backbone=1e-6, patterns={"connector": ("embed.*",)}
    )
    assert names(groups, "connector") == {"embed.weight", "embed.bias"}
    assert "embed.weight" not in names(groups, "backbone")


@pytest.mark.parametrize("decay", [0.0, 0.5, None])
def test_a_groups_weight_decay_travels_even_if_zero(model: nn.Module, decay: float | None) -> None:
    (group,) = dit_lora.parameter_groups(model, adapter=GroupConfig(lr=1e-4, weight_decay=decay))
    assert group.get("weight_decay") == decay


def test_a_quantised_weight_is_not_trained(model: nn.Module) -> None:
    model["out"].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)
    groups = dit_lora.parameter_groups(model, adapter=1e-4, backbone=1e-6)
    assert "out.weight" not in names(groups, "backbone")
    assert model["out"].weight.dtype is torch.int8


def test_base_weights_are_named_as_in_an_unadapted_model(model: nn.Module) -> None:
    dit_lora.parameter_groups(model, adapter=1e-4, backbone=1e-6, patterns=PATTERNS)
    assert "blocks.0.to_q.weight" in get_base_parameters(model)
    assert not any("base_layer" in name for name in get_base_parameters(model))


def test_groups_that_match_nothing_are_all_named(model: nn.Module) -> None:
    with pytest.raises(DitLoraError, match=r"match nothing: connector, backbone; .*") as error:
        dit_lora.parameter_groups(
            model,
            adapter=1e-4,
            connector=GroupConfig(lr=1, modules=("emb",)),
            backbone=GroupConfig(lr=1, modules=("layers.*",)),
        )
    assert "embed.*" in str(error.value)


def test_a_trainable_parameter_in_no_group_is_an_error(model: nn.Module) -> None:
    model.get_parameter("out.bias").requires_grad_(True)
    with pytest.raises(DitLoraError, match=r"not in any parameter group\n  - out\.bias"):
        dit_lora.parameter_groups(model, adapter=1e-4)


def test_no_group_at_all_is_an_error(model: nn.Module) -> None:
    with pytest.raises(DitLoraError, match="at least one group"):
        dit_lora.parameter_groups(model)
