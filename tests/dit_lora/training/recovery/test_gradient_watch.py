"""Which steps' gradients are checked, and which runs are refused a check by name."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Event
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.guard.gradient_check.check import GradientReport
from dit_lora.training.check_budget import (
    GRADIENT_CHECK_SHARE,
    count_steps_to_cover_check,
    estimate_gradient_evaluations,
)
from dit_lora.training.distributed.context_parallel import ContextParallel
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.distributed.fsdp import ShardedEngine
from dit_lora.training.distributed.zero import Zero2
from dit_lora.training.recovery.gradient_watch import PeriodicGradientCheck

FP32 = torch.float32


def make_watch(
    gradient_every: int | str,
    *,
    start_step: int = 0,
    steps: int = 100,
    engine: type[Engine] = Engine,
    num_processes: int = 1,
    fp8: str = "off",
    adapter: str = "lora",
    on_nonfinite: tuple[str, ...] = ("fallback",),
) -> PeriodicGradientCheck:
    setup: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            guard=SimpleNamespace(gradient_every=gradient_every, on_nonfinite=on_nonfinite),
            kernels=SimpleNamespace(fp8=fp8),
            lora=SimpleNamespace(kind=adapter),
            train=SimpleNamespace(steps=steps),
        ),
        accelerator=SimpleNamespace(num_processes=num_processes),
        engine=object.__new__(engine),
        dtype=FP32,
    )
    recovery: Any = SimpleNamespace(
        state=SimpleNamespace(switched_off=[], lr_scale=1.0),
        files=SimpleNamespace(say=lambda _line: None),
        engine=SimpleNamespace(local_state_dict=lambda: {"weight": torch.ones(2)}, load_scalar_state=None),
    )
    return PeriodicGradientCheck(setup, recovery, start_step)


def list_due_steps(watch: PeriodicGradientCheck, num_evaluations: int = 22) -> list[int]:
    """The steps at which a run checks, if each check agrees and takes so many evaluations."""
    due = []
    for step in range(watch.start_step + 1, watch.setup.recipe.train.steps + 1):
        if watch.is_due(step):
            due.append(step)
            watch._record_sound_step(step, GradientReport("agrees", (), num_evaluations))
    return due


def test_the_first_step_and_every_so_many_are_due() -> None:
    assert list_due_steps(make_watch(0)) == []
    assert list_due_steps(make_watch(30)) == [1, 30, 60, 90]
    # After a resume, whatever is different on this machine has not been checked.
    assert list_due_steps(make_watch(30, start_step=45)) == [46, 60, 90]


def test_a_step_after_a_fallback_is_due() -> None:
    watch = make_watch(30)
    watch._num_switched_off = 0
    watch.recovery.state.switched_off.append("qk_norm_rope")
    assert watch.is_due(8)
    watch._num_switched_off = 1
    assert not watch.is_due(8)


def test_the_state_of_a_step_that_was_undone_is_not_kept() -> None:
    watch = make_watch(30, on_nonfinite=("fallback", "rollback"))
    state = watch._good_state
    assert state is not None
    watch._record_sound_step(30, GradientReport("agrees", (), 22))
    assert state.step == 29
    watch.restart_after_step(29)
    assert state.find_finite_step() == 29
    # A rollback after a NaN, for example.
    watch.restart_after_step(20)
    assert state.find_finite_step() is None
    assert watch._last_sound_step == 20
    watch._record_sound_step(60, GradientReport("agrees", (), 22))
    assert state.step == 59
    assert make_watch(30, on_nonfinite=("fallback", "stop"))._good_state is None


def test_a_run_that_cannot_save_still_says_why_it_stops() -> None:
    def fail(*_: object) -> None:
        raise DitLoraError("cannot write checkpoints: No space left on device")

    watch = make_watch(30, on_nonfinite=("stop",))
    files = SimpleNamespace(find_newest_saved_step=lambda: 0, save_run_checkpoint=fail)
    watch.recovery = cast(Any, SimpleNamespace(files=files, state_dict=dict))
    with pytest.raises(NonFiniteError) as stopped:
        watch._save_and_stop_run(
            5, "the gradient is wrong", Event(5, "gradient_check", {}, action="stop", seconds=0.0)
        )
    assert str(stopped.value).splitlines() == [
        "step 5: the gradient is wrong",
        "stopped, because guard.on_nonfinite has no fallback",
        "cannot write checkpoints: No space left on device",
    ]


@pytest.mark.parametrize("num_evaluations", [10, 22, 150])
def test_automatic_checks_cost_their_share_at_most(num_evaluations: int) -> None:
    watch = make_watch("auto", steps=4000)
    due = list_due_steps(watch, num_evaluations)
    assert due[0] == 1
    assert len(due) >= 1
    # A step is a forward pass and a backward pass of twice its time. The first check's cost is an estimate.
    first, *later = [num_evaluations / 3] * len(due)
    assert sum(later) <= GRADIENT_CHECK_SHARE * 4000
    assert first <= 50
    assert [b - a for a, b in pairwise(due)] == [count_steps_to_cover_check(num_evaluations)] * len(later)


def test_a_run_that_is_too_short_for_an_automatic_check_says_so() -> None:
    steps = count_steps_to_cover_check(estimate_gradient_evaluations(FP32))
    short, long = make_watch("auto", steps=steps - 1), make_watch("auto", steps=steps)
    assert list_due_steps(short) == []
    assert short.skipped_reason is not None
    assert f"needs a run of {steps} steps" in short.skipped_reason
    assert (list_due_steps(long), long.unsupported_reason) == ([1], None)
    assert make_watch("auto", steps=steps).skipped_reason is None
    assert make_watch(5, steps=3).skipped_reason is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": ShardedEngine}, "FSDP2"),
        ({"engine": ContextParallel}, "train.context_parallel"),
        ({"fp8": "on"}, "kernels.fp8=on"),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    watch = make_watch(1, **options)
    assert watch.unsupported_reason is not None
    assert f"not checked with {name}: " in watch.unsupported_reason
    assert list_due_steps(watch) == []
    # DDP, ZeRO-2 and DoRA are supported.
    assert make_watch(1, num_processes=2, adapter="dora").unsupported_reason is None
    assert make_watch(1, engine=Zero2, num_processes=2).unsupported_reason is None
    # Without a check there is nothing to refuse.
    assert make_watch(0, **options).unsupported_reason is None
