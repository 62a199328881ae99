"""What a launch may ask of DeepSpeed, and which recipes ZeRO's parts rule out; DeepSpeed itself is not needed."""

import importlib.util
from typing import Any

import pytest

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.training.session.launch import pop_zero_stage, require_shardable

ASKED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_it_is_taken_out_of_the_environment_so_that_accelerate_does_not_see_it(
    installed: None,
) -> None:
    environment = dict(ASKED)
    assert pop_zero_stage(environment) == 2
    assert "ACCELERATE_USE_DEEPSPEED" not in environment
    assert pop_zero_stage(environment) is None
    assert pop_zero_stage({"ACCELERATE_USE_DEEPSPEED": "false"}) is None
    assert pop_zero_stage({"ACCELERATE_USE_DEEPSPEED": "true"}) == 2  # Accelerate's default


def test_what_only_deepspeed_would_do_is_refused_all_at_once(installed: None) -> None:
    environment = {
        **ASKED,
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json",
    }
    with pytest.raises(DitLoraError) as error:
        pop_zero_stage(environment)
    assert str(error.value).splitlines()[1:] == [
        "  - ZeRO stage 3: set zero_stage: 2, or launch with accelerate_configs/fsdp2.yaml",
        "  - deepspeed_config_file zero.json: remove it; the recipe says everything else",
        "  - deepspeed_offload_optimizer_device cpu: remove it; use more GPUs to lower memory",
        "  - gradient_clipping 0.5: remove it; optim.clip decides",
    ]


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DitLoraError, match=r"pip install 'dit-lora\[deepspeed\]'"):
        pop_zero_stage(dict(ASKED))


def test_what_needs_whole_tensors_or_leaves_some_without_a_gradient_is_refused_by_name(
    recipe_values: dict[str, Any],
) -> None:
    require_shardable(parse_recipe(recipe_values, "test"), "zero2")
    recipe_values["optim"]["name"] = "adamw_8bit"
    with pytest.raises(DitLoraError) as error:
        require_shardable(parse_recipe(recipe_values, "test"), "zero2", has_idle_parameters=True)
    assert [line.split(":")[0].strip(" -") for line in str(error.value).splitlines()[1:]] == [
        "optim.name=adamw_8bit",
        "optim.groups.connector or backbone",
    ]
