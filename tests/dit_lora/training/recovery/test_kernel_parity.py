"""How much a comparison of kernels compares: all that was asked for, and less after the last step of a short run."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dit_lora.config.recipe import GuardConfig
from dit_lora.guard.comparison.block_parity import MIN_PASSES
from dit_lora.training.recovery import kernel_parity
from dit_lora.training.recovery.kernel_parity import PeriodicKernelComparison
from dit_lora.training.session.phases import PhaseTimer

NUM_BLOCKS = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(NUM_BLOCKS))


class Watch(PeriodicKernelComparison):
    """With two kernels in every block."""

    fallbacks: Any = (SimpleNamespace(parent=None), SimpleNamespace(parent=None), SimpleNamespace(parent="first"))
    blocks: Any = tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))
    replaced_ops: Any = ()


def make_watch(steps: int, **guard: Any) -> Watch:
    train = SimpleNamespace(steps=steps, batch_size=2, accumulate=1)
    session = SimpleNamespace(phases=PhaseTimer())
    recipe = SimpleNamespace(guard=GuardConfig(**guard), train=train)
    setup: Any = SimpleNamespace(recipe=recipe, session=session, transformer=Model())
    recovery: Any = SimpleNamespace(state=SimpleNamespace(passed=0, switched_off=[]))
    return Watch(setup, recovery)


@pytest.mark.parametrize(
    ("step", "guard"),
    [(12, {"parity_every": 500}), (12, {"parity_every": 6}), (500, {}), (499, {})],
    ids=["set", "due", "due by default", "long"],
)
def test_what_is_asked_for_is_compared_in_full(step: int, guard: dict[str, Any]) -> None:
    watch = make_watch(step, **guard)
    assert watch._choose_blocks(step) == MIN_PASSES
    assert watch.selected_blocks is not None
    assert len(watch.selected_blocks) == kernel_parity._MAX_BLOCKS
    assert not watch.setup.session.phases.reductions


def test_after_a_short_run_one_block_of_each_kind_is_compared_and_that_is_recorded() -> None:
    watch = make_watch(12)
    assert watch._choose_blocks(12) == 0, "as few passes as a comparison can have"
    assert watch.selected_blocks == {"blocks.11"}
    assert watch.setup.session.phases.reductions == {
        "kernels at the end": "1 of 12 blocks, 2 of 32 repetitions; in full with guard.parity_every=12"
    }
    longer = make_watch(200)
    assert longer._choose_blocks(200) == 0.015 * 200 * NUM_BLOCKS / 2 - NUM_BLOCKS / 3 - 1


def test_steps_since_the_last_comparison_pay_for_the_next() -> None:
    watch = make_watch(512)
    watch.recovery.state.passed = 500
    watch._choose_blocks(512)
    assert watch.selected_blocks == {"blocks.11"}


@pytest.mark.parametrize(
    ("steps", "guard", "num_passes"),
    [(12, {}, 2), (300, {}, 22), (2000, {}, MIN_PASSES), (12, {"preflight": "anew"}, MIN_PASSES)],
)
def test_preflight_repeats_kernels_less_often_in_a_short_run(
    steps: int, guard: dict[str, Any], num_passes: int
) -> None:
    assert make_watch(steps, **guard).choose_preflight_passes() == num_passes
