"""What `optim.name` refuses: a machine or rates that the optimizer cannot work with."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dit_lora.config.optim import OptimConfig
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.training.optim import build as optimizer_module
from dit_lora.training.optim.build import require_optimizer

pytest.importorskip("bitsandbytes")
pytest.importorskip("prodigyopt")

CPU = torch.device("cpu")


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, record in OPTIMIZERS.items():
        with monkeypatch.context() as patch:
            if record.extra is not None:
                patch.setitem(sys.modules, record.package, None)  # as if it were not there
                with pytest.raises(DitLoraError, match=f"{name}: {record.package} is not installed") as error:
                    require_optimizer(OptimConfig(name=name), CPU)
                assert f"pip install 'dit-lora[{record.extra}]'" in str(error.value)
            require_optimizer(OptimConfig(), CPU)


def test_paged_moments_need_a_gpu_that_pages() -> None:
    """bitsandbytes itself warns and does not page."""
    with pytest.raises(DitLoraError, match=r"CUDA GPU.* this run is on cpu; use .*adamw_8bit"):
        require_optimizer(OptimConfig(name="paged_adamw_8bit"), CPU)
    for name, record in OPTIMIZERS.items():
        if record.unpaged_variant is None:
            require_optimizer(OptimConfig(name=name), CPU)


def test_a_bitsandbytes_without_code_for_the_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(optimizer_module, "build_optimizer", broken)
    with pytest.raises(DitLoraError, match=r"cannot take a step on cpu: no kernel image") as error:
        require_optimizer(OptimConfig(name="adamw_8bit"), CPU)
    assert "\n" not in str(error.value)
    require_optimizer(OptimConfig(name="prodigy"), CPU)


def recipe(train: Mapping[str, Any] | None = None, **optim: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"family": "dit", "path": "x"},
            "data": {"path": "x", "height": 16, "width": 16, "fps": 8},
            "optim": optim,
            "train": {"steps": 1, **(train or {})},
            "run": {"dir": "x"},
        }
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "optim.groups.adapter.lr=0.0001: under optim.name=prodigy it multiplies"),
        ({"adapter": {"lr": 11}}, "and must be 0.1 to 10; give 1"),
        (
            {"adapter": {"lr": 1}, "adapter_b": {"lr": 2}},
            "adapter: lr 1, constant.*adapter_b: lr 2",
        ),
        (
            {"adapter": {"lr": 1}, "connector": {"lr": 1, "schedule": "linear"}},
            "connector: lr 1, linear, warmup_steps 0",
        ),
        (
            {"adapter": {"lr": 1}, "connector": {"lr": 1, "warmup_steps": 3}},
            "connector: lr 1, constant, warmup_steps 3",
        ),
    ],
)
def test_prodigy_takes_one_multiplier_for_all_groups(groups: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        recipe(name="prodigy", groups=groups)
    recipe(name="adamw_8bit", groups=groups)


def test_prodigy_is_not_asked_about_groups_that_do_not_train() -> None:
    """`train.mode: full` has no adapter, and its default rate stays in the recipe."""
    group_values_by_chart_point = {
        "lr": 1,
        "warmup_steps": 0,
        "schedule": "constant",
        "weight_decay": 0.1,
        "clip": 2,
    }
    recipe(name="prodigy", groups={"adapter": {"lr": 1}, "connector": group_values_by_chart_point})
    recipe({"mode": "full"}, name="prodigy", groups={"backbone": {"lr": 1}})
