"""An optimizer that the package has never seen trains by its record alone, as any other does."""

import shutil
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_runs import Main
from launching import ROOT
from micro_batches import FakeContext
from runs import adapter, lines, same_adapter
from safetensors.torch import load_file

from dit_lora.config.load import load_recipe
from dit_lora.config.optimizers import OPTIMIZERS, OptimizerRecord, count_moment_bytes
from dit_lora.config.recipe import Recipe
from dit_lora.environment.versions import TESTED
from dit_lora.errors import DitLoraError
from dit_lora.guard.finite_gate import can_skip_on_device
from dit_lora.guard.state_checks import find_bad_state
from dit_lora.training.optim.build import require_optimizer
from dit_lora.training.session.launch import require_shardable

CPU = torch.device("cpu")
SMOKE = ROOT / "recipes" / "smoke" / "cogvideox.yaml"


class Leaning(torch.optim.Optimizer):
    """Steps by the sign of a moving average; its rate falls with every step that it takes."""

    def __init__(self, params: Any, betas: Any, eps: float, weight_decay: float, *, bold: bool):
        defaults = {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"lean": 1.0, "bold": bold})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in [param for param in group["params"] if param.grad is not None]:
                state = self.state[parameter]
                if not state:
                    state["magnitude"] = torch.zeros_like(parameter)
                state["magnitude"].lerp_(parameter.grad.abs(), 0.1)
                step = parameter.grad / (state["magnitude"] + group["eps"])
                parameter.sub_(group["lr"] * group["lean"] * step.clamp(-1, 1))
            group["lean"] *= 0.5


RECORD = OptimizerRecord(
    description="steps by signs.",
    class_path=f"{__name__}:Leaning",
    state_bytes=partial(count_moment_bytes, num_moments=1, step_bytes=0),
    class_kwargs={"bold": True},
    smaller_variant="adamw_8bit",
    nonnegative_state=("magnitude",),
    group_numbers=("lean",),
    lr_factor="lean",
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "leaning", RECORD)


def test_a_recipe_trains_and_resumes_with_it_bit_for_bit(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    args = [*smoke, "optim.name=leaning", "train.steps=4", "train.save_every=2", "train.keep=9"]
    lora_main([*args, f"run.dir={uninterrupted}"])
    lora_main([*args, f"run.dir={parts}"])
    shutil.rmtree(parts / "checkpoints" / "step_000004")  # as if killed after step 2
    lora_main([*args, f"run.dir={parts}", "train.resume=auto"])
    assert same_adapter(parts, uninterrupted)
    assert any(tensor.any() for name, tensor in adapter(uninterrupted).items() if "lora_B" in name)
    rates = [line["lr_groups"]["adapter"] for line in lines(uninterrupted, "metrics.jsonl")]
    assert [rate / rates[0] for rate in rates] == [1, 0.5, 0.25, 0.125]
    state = load_file(parts / "checkpoints" / "step_000004" / "optimizer.safetensors")
    assert state["adapter/lean"].item() == 0.5**4
    assert {name.rpartition("/")[2] for name in state} == {"lean", "magnitude"}


def recipe() -> Recipe:
    return load_recipe(SMOKE, ["optim.name=leaning", "model.path=x", "data.path=x"])


def test_its_facts_are_those_of_its_record() -> None:
    optim = recipe().optim
    require_optimizer(optim, CPU)
    for sharding in ("fsdp2", "zero2"):
        with pytest.raises(DitLoraError, match=r"optim\.name=leaning: set it to adamw"):
            require_shardable(recipe(), sharding)


def test_its_state_is_checked_as_its_record_says() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Leaning(model.parameters(), (0.9, 0.9), 1e-8, 0.0, bold=True)
    assert not can_skip_on_device(optimizer)
    names = {"adapter/weight/magnitude": torch.tensor([1.0, -1.0])}
    batch: Any = SimpleNamespace(step=1, rank=0, micro_step=0)
    diagnosis = find_bad_state(batch, FakeContext(model=model, state=names.items))
    assert diagnosis is not None
    assert "adapter/weight/magnitude must not be negative" in diagnosis.message


def test_every_record_has_its_package_pinned_and_its_extra_and_agrees_with_itself() -> None:
    extras = metadata.metadata("dit-lora").get_all("Provides-Extra") or []
    for name, record in OPTIMIZERS.items():
        assert record.package in TESTED
        assert record.extra is None or record.extra in extras
        assert {record.smaller_variant, record.unpaged_variant} <= {None, *OPTIMIZERS}
        if record.smaller_variant is not None:  # `plan` proposes it, and the learning rates stay
            assert OPTIMIZERS[record.smaller_variant].lr_bounds == record.lr_bounds
        assert set(record.squared_state) <= set(record.nonnegative_state), name
        if "zero2" in record.supported_sharding:  # its parts are flat: nothing of a group, no read by the host
            assert record.found_inf_class
            assert not record.group_numbers
        if record.lr_factor is not None:
            assert record.lr_factor in record.group_numbers
