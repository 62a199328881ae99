"""Compares a run's fused kernels with the stock model, before the first step and again while it trains.

One that differs is switched off; one that goes wrong late too, and its steps are taken again.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from dit_lora.data.loading.batch import Batch
from dit_lora.errors import listed
from dit_lora.fuse.patches import ATTENTION, KERNELS, OPS, fusion_of
from dit_lora.guard.comparison.block_kinds import Calls
from dit_lora.guard.comparison.block_parity import (
    PASSES,
    Coverage,
    Learning,
    blocks_of,
    is_repeated,
)
from dit_lora.guard.comparison.parity import Difference, How, differences, first_difference
from dit_lora.guard.event import kernel_event
from dit_lora.guard.gate import NonFiniteError
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.switches import COMPILE, Switch
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.execution.activation_checkpointing import in_mode, least_memory
from dit_lora.training.guarding.compared_batches import micro_batch_of, several_rows, turn_off
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.guarding.state_checks import own_state
from dit_lora.training.loop import WentBackError
from dit_lora.training.task import AnySetup

_RECENT = 4
"""Number of micro-batches that are kept to be compared on: where they are of one sample, two of them make one."""

_NO_MEMORY = "there was no memory for it"
_BLOCKS = 8
"""Number of repeated blocks that one comparison takes: a kernel is the same in all, and fp32 costs."""


@dataclass
class ParityWatch:
    """Compares a run's kernels with the stock model before its first step and every `guard.parity_every` steps.

    It keeps the state of the last comparison that passed, and facts about the model. Its forward passes run between
    two steps; weights, gradients, buffers, random state and the order of data are the same bits afterwards.
    """

    setup: AnySetup
    recovery: RunRecovery
    learning: Learning | None = None
    """Tells which inputs of the model's blocks have a gradient in training."""
    calls: Calls = field(default_factory=dict)
    """The inputs that the model's blocks were called with in preflight."""
    only: Collection[str] | None = None
    """Names of the blocks that are compared, where not all are."""
    coverage: Coverage = field(default_factory=Coverage)
    """The blocks that the last comparison reached, over all ranks."""
    ema: TrainedEMA | None = None
    start_step: int = 0
    _recent: deque[Batch] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _held: Snapshots | None = None
    _lr_scale: float = 1.0
    _turn: int = 0

    def start(self, *, compared: bool) -> None:
        """Hold the state of the start, after preflight; `compared` says whether that compared the kernels."""
        config = self.setup.recipe.guard
        if config.parity_every and self.switches:
            self._held = Snapshots(
                lambda: own_state(self.setup.engine, self.ema),
                every=config.parity_every,
                keep=1,
                put=self.setup.engine.put_numbers,
            )
        # Without preflight no comparison has passed, and there is nothing right to go back to.
        if compared:
            self._hold(self.start_step)

    @property
    def switches(self) -> list[Switch]:
        """Switches that are compared: kernels that are on, and attention backends that the recipe names.

        Once the run has started without torch.compile: what it made is compared before the first step.
        """
        off = self.recovery.state.switched_off
        switches = self.recovery.suspects.switches
        on = [switch for switch in switches if not {switch.name, switch.part_of} & {*off}]
        return [
            switch
            for switch in on
            if (switch.cause == "kernel" or switch.insisted)
            and not (switch.name == COMPILE and self._held is not None)
        ]

    def noting(self, batches: Iterable[Batch], start_step: int) -> Iterator[Batch]:
        """Yield the same micro-batches; the last ones that training is given after that step are remembered."""
        if (
            self._held is not None
            and self.recovery.state.passed is not None
            and start_step < self.recovery.state.passed
        ):
            self._hold(start_step)  # the guard has gone back, and what is held was of what it left
        for batch in batches:
            self._recent.append(batch)
            yield batch

    def after_step(self, step: int, *, last: bool) -> None:
        """Compare if it is due. Collective.

        Raises `WentBackError` on every rank where training goes on after an earlier step.
        """
        every = self.setup.recipe.guard.parity_every
        if self._held is None or not (last or step % every == 0) or not self.switches:
            return
        began = time.perf_counter()
        self.only, self._turn = some_blocks(self.blocks, self._turn)
        # A bad entry's NaN would be taken for the kernel's.
        good = [batch for batch in self._recent if not batch.faults]
        batch = several_rows(good[-1], good[:-1][::-1])
        differing = []
        for switch, difference, rank in self.differing([micro_batch_of(self.setup, batch)]):
            turn_off(self.recovery, switch)
            differing.append((switch.name, difference, rank))
        if differing:
            self._act(step, differing, time.perf_counter() - began)
        self._hold(step)

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks in which a kernel replaced something; of all, with a switch of another kind."""
        names, places = blocks_of(self.setup.transformer), [module for _, module in self.places]
        ours = {*OPS, ATTENTION, KERNELS, COMPILE}
        if any(s.name.partition(":")[0] not in ours for s in self.switches):
            return names
        return [name for name in names if any(_holds(name, module) for module in places)]

    def differing(
        self, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[tuple[Switch, Difference, int]]:
        """Yield what differs on any rank, with that rank; switch it off before asking for the next. Collective."""
        self.coverage = Coverage()
        self.only = self.blocks if self.only is None else self.only
        ranks: dict[str, int] = {}

        def compare(switch: Switch, others: Sequence[Switch]) -> Difference | None:
            for index, one in enumerate(micro_batches):
                # One batch says whether a kernel repeats itself. One that is wrong now and then must be met alone
                # as it was met among all.
                passes = 0 if index else 4 * PASSES if switch.part_of else PASSES
                difference = self._difference(one, switch, others, passes)
                # A kernel may be wrong on one GPU alone: all ranks have to switch it off together.
                every: list[Difference | None] = gather_object([difference])
                first = next(((r, d) for r, d in enumerate(every) if d is not None), None)
                if first is not None:
                    ranks[switch.name] = first[0]
                    return first[1]
            return None

        for switch, difference in differences(self.switches, compare):
            yield switch, difference, ranks[switch.name]
        self._gather_coverage()

    def _difference(
        self, one: MicroBatch, switch: Switch, others: Sequence[Switch], passes: int
    ) -> Difference | None:
        model = self.setup.transformer
        in_blocks = switch.name != COMPILE and (switch.cause == "kernel" or switch.part_of)
        if switch.name == COMPILE and self.setup.recipe.train.batch_size == 1:
            one = one.single(0)  # for two samples it would be compiled once more
        # The whole stock model may need more memory than the run has chosen its checkpointing for.
        mode = "none" if in_blocks else least_memory(model)
        how = How(self.learning, self.coverage, passes, self.only)
        try:
            with in_mode(model, mode):
                return first_difference(
                    switch, lambda: one.forward().losses, model, others=others, how=how
                )
        except torch.OutOfMemoryError:
            self.coverage.missed[""] = _NO_MEMORY
            return None

    def _gather_coverage(self) -> None:
        """Set the coverage to what was compared on every rank, and what was not on any."""
        every: list[Coverage] = gather_object([self.coverage])
        # Compared only if on every rank: each GPU runs its own copy of the kernel.
        compared = set.intersection(*(one.compared for one in every))
        missed = {name: why for one in every for name, why in one.missed.items()}
        places = [module for _, module in self.places]
        telling = {n for n in missed if not places or any(_holds(n, m) for m in places)}
        self.coverage = Coverage(compared, {n: missed[n] for n in telling - compared})

    @property
    def places(self) -> list[tuple[str, str]]:
        """Pairs of an op and the module in which it replaced something."""
        fusion = fusion_of(self.setup.transformer)
        return fusion.replaced if fusion is not None else []

    def not_compared(self) -> list[tuple[Switch, str]]:
        """Return the kernels that are on and that no comparison reached, and why."""
        compared, missed = self.coverage.compared, self.coverage.missed
        why = next(iter(missed.values()), "no sample's forward pass reached it")
        left = []
        for switch in self.switches:
            modules = [module for op, module in self.places if op == switch.name]
            reached = [m for m in modules if any(_holds(block, m) for block in compared)]
            is_whole = any(one.part_of == switch.name for one in self.switches)
            if not is_whole and not (reached if modules else compared):
                left.append((switch, why))
        return left

    def trained_with(self, step: int) -> str:
        """Say which steps may have been trained with a kernel that is found to be wrong after `step`, if any were."""
        passed = self.recovery.state.passed
        if step == 0 or passed == step:
            return ""
        first = 1 if passed is None else passed + 1
        return f"; steps {first} to {step} may have been trained with it, and are not taken again"

    def _hold(self, step: int) -> None:
        self.recovery.state.passed = step
        if self._held is not None:
            self._held.take(step)
            self._held.read(step)  # copied to its end, before an optimizer writes
            self._lr_scale = self.recovery.state.lr_scale

    def _act(self, step: int, wrong_kernels: list[Any], seconds: float) -> None:
        recovery, rungs = self.recovery, self.setup.recipe.guard.on_nonfinite
        target = self._target() if "rollback" in rungs else None
        action = "fallback" if target is None else "rollback"
        action = action if "fallback" in rungs else "stop"
        lines, events = [], []
        for name, difference, rank in wrong_kernels:
            words = f"{difference.words}; switched off for this run"
            if action != "rollback":
                words += self.trained_with(step)
            event = kernel_event(
                step,
                "parity",
                words,
                name,
                module=difference.module,
                action=action,
                rank=rank,
                seconds=seconds,
            )
            events.append(event)
            lines.append(words)
            recovery.files.event(event)
        done = f"rolled back to step {target}, where it was right" if target is not None else ""
        if action == "stop":
            message = listed(f"step {step}: a kernel has gone wrong", lines)
            raise NonFiniteError(
                f"{message}\nstopped: guard.on_nonfinite has no fallback", events[0].record()
            )
        summary = f"guard: step {step}: a kernel has gone wrong; {done or 'training goes on'}"
        recovery.files.say(listed(summary, lines))
        choose_checkpointing(self.setup)  # without the kernel, more is kept for backward
        if target is not None:
            self._go_back(target)
            raise WentBackError(target)

    def _target(self) -> int | None:
        """Return the step that is held, if it is finite on every rank."""
        steps = self._held.steps if self._held is not None else []
        if not steps or self._held is None:
            return None
        bad = gather_object(self._held.not_finite(steps[-1]))
        return None if bad else steps[-1]

    def _go_back(self, target: int) -> None:
        """Restore the state of then, and the guard's too: what it found since was computed by a wrong kernel."""
        guard = self.recovery
        assert self._held is not None
        guard.drop_state(self._held.restore(target))
        guard.state.lr_scale = self._lr_scale
        # Snapshots of the steps between hold what the wrong kernel had trained.
        for later in [held for held in guard.snapshots.steps if held > target]:
            guard.snapshots.forget(later)
        # The next trip needs a state to go back to, and the later ones are gone.
        guard.snapshots.take(target)
        # Checkpoints after it hold what the wrong kernel had trained.
        guard.files.rewind(target, other_trajectory=True)


def _holds(block: str, module: str) -> bool:
    return block in ("", module) or module.startswith(f"{block}.")


def some_blocks(names: Sequence[str], turn: int) -> tuple[set[str], int]:
    """Return what stands beside the repeated blocks, these' first and last, and others in turn; and the next turn."""
    repeated = [name for name in names if is_repeated(name)]
    if len(repeated) <= _BLOCKS:
        return {*names}, turn
    between, count = repeated[1:-1], _BLOCKS - 2
    taken = {between[(turn + k) % len(between)] for k in range(count)}
    left_out = {*between} - taken
    return {*names} - left_out, turn + count
