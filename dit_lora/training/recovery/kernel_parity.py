"""Compares a run's fused kernels with the unpatched model, before the first step and during training.

A kernel that differs is switched off. If it goes wrong during training, the steps since the last good comparison are
repeated.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dit_lora.data.loading.batch import Batch
from dit_lora.errors import format_list
from dit_lora.fuse.patches import ATTENTION, KERNELS, OPS, get_fusion
from dit_lora.guard.comparison.block_kinds import BlockInputs, select_block_per_kind
from dit_lora.guard.comparison.block_parity import (
    MIN_PASSES,
    ComparisonCoverage,
    GradFlags,
    find_blocks,
    is_list_element,
)
from dit_lora.guard.comparison.parity import (
    ComparisonOptions,
    KernelDifference,
    find_first_difference,
    iter_differences,
)
from dit_lora.guard.diagnosis import make_kernel_event
from dit_lora.guard.fallbacks import COMPILE, Fallback
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.check_budget import count_affordable_block_passes
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.execution.activation_checkpointing import choose_least_memory_mode, use_checkpointing_mode
from dit_lora.training.loop import RolledBackError
from dit_lora.training.recovery.good_state import LastGoodSnapshot
from dit_lora.training.recovery.parity_batches import (
    MIN_SAMPLES,
    disable_for_run,
    ensure_min_samples,
    make_micro_batch,
)
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.task import AnySetup

_NUM_RECENT_BATCHES = 4
"""Number of recent micro-batches kept for comparisons; two micro-batches of one sample are joined into one."""

_NO_MEMORY = "not enough memory"
_MAX_BLOCKS = 8
"""Maximum number of repeated blocks in one comparison: all run the same kernel, and fp32 is expensive."""


@dataclass
class PeriodicKernelComparison:
    """Compares a run's kernels with the unpatched model before its first step and every `guard.parity_every` steps.

    It holds the state of the last comparison that passed. Its forward passes run between two steps; weights,
    gradients, buffers, random state and data order are bitwise unchanged afterwards.
    """

    setup: AnySetup
    recovery: RunRecovery
    trained_inputs: GradFlags | None = None
    """Which inputs of the model's blocks have a gradient in training."""
    block_calls: BlockInputs = field(default_factory=dict)
    """The inputs with which preflight called the model's blocks."""
    selected_blocks: Collection[str] | None = None
    """Names of the blocks to compare; None for all."""
    coverage: ComparisonCoverage = field(default_factory=ComparisonCoverage)
    """The blocks that the last comparison reached, over all ranks."""
    ema: TrainedEMA | None = None
    start_step: int = 0
    _recent_batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_BATCHES))
    _good_state: LastGoodSnapshot | None = None
    _block_offset: int = 0

    def start_periodic_comparisons(self, *, was_compared: bool) -> None:
        """Start periodic kernel comparisons: hold the present state as good.

        `was_compared`: preflight compared the kernels.
        """
        config = self.setup.recipe.guard
        if config.parity_every and self.fallbacks:
            self._good_state = LastGoodSnapshot(self.recovery, self.ema)
        # Without preflight no comparison has passed: there is no known good state to return to.
        if was_compared:
            self._take_snapshot(self.start_step)

    @property
    def fallbacks(self) -> list[Fallback]:
        """Kernels and attention backends to compare with the unpatched model.

        They are the kernels that are on, and the backends that the recipe names. torch.compile is left out once the
        run has started: compiled code is compared only before the first step.
        """
        disabled_names = self.recovery.state.switched_off
        switches = self.recovery.diagnosis_context.fallbacks
        # A part is off too if its parent is.
        enabled_switches = [switch for switch in switches if not {switch.name, switch.parent} & {*disabled_names}]
        return [
            switch
            for switch in enabled_switches
            if (switch.cause == "kernel" or switch.required)
            and not (switch.name == COMPILE and self._good_state is not None)
        ]

    def record_recent_batches(self, batches: Iterable[Batch], start_step: int) -> Iterator[Batch]:
        """Yield the micro-batches unchanged, and keep the latest ones, on which kernels are compared with the
        reference.
        """
        passed = self.recovery.state.passed
        if self._good_state is not None and passed is not None and start_step < passed:
            # The guard rolled back, so the held state belongs to a discarded step.
            self._take_snapshot(start_step)
        for batch in batches:
            # Before the yield: the present step's batch can be compared after that step.
            self._recent_batches.append(batch)
            yield batch

    def compare_kernels_if_due(self, step: int, *, is_last: bool) -> None:
        """Compare the kernels with the unpatched model if this step is due. Collective.

        Raises `RolledBackError` on every rank if training must continue from an earlier step.
        """
        interval = self.setup.recipe.guard.parity_every
        if self._good_state is None or not (is_last or step % interval == 0) or not self.fallbacks:
            return
        # Compared at this step already: it became the last one only afterwards.
        if self.recovery.state.passed == step:
            return
        began = time.perf_counter()
        num_passes = self._choose_blocks(step)
        # A bad sample's NaN would look like the kernel's.
        good = [batch for batch in self._recent_batches if not batch.faults]
        # The newest good batch; if it is too small, the next newest that fits is joined to it.
        batch = ensure_min_samples(good[-1], good[:-1][::-1])
        differing = []
        for switch, difference, rank in self.iterate_differing_kernels(
            [make_micro_batch(self.setup, batch)], num_passes
        ):
            disable_for_run(self.recovery, switch)
            differing.append((switch.name, difference, rank))
        if differing:
            self._disable_wrong_kernels(step, differing, time.perf_counter() - began)
        self._take_snapshot(step)

    def _choose_blocks(self, step: int) -> int:
        """Choose the blocks to compare after this step, and how often a kernel is compared with itself.

        A comparison that only the end of the run asks for is limited by the steps since the last one. Collective.
        """
        config = self.setup.recipe.guard
        is_requested = step % config.parity_every == 0 or "parity_every" in config.model_fields_set
        self.selected_blocks, self._block_offset = choose_blocks(self.blocks, self._block_offset)
        affordable = self.count_affordable_block_passes(step - (self.recovery.state.passed or 0))
        if is_requested or affordable >= MIN_PASSES + len(self.selected_blocks):
            return MIN_PASSES
        self.selected_blocks = self.select_block_per_kind()
        num_passes = min(MIN_PASSES, max(0, affordable - len(self.selected_blocks)))
        self.setup.session.phases.reductions["kernels at the end"] = (
            f"{len(self.selected_blocks)} of {len(self.blocks)} blocks, {max(2, num_passes)} of {MIN_PASSES} "
            f"repetitions; in full with guard.parity_every={step}"
        )
        return num_passes

    def choose_preflight_passes(self) -> int:
        """Number of passes that compare a kernel with itself in preflight: fewer in a short run by default."""
        if not self.fallbacks or "preflight" in self.setup.recipe.guard.model_fields_set:
            return MIN_PASSES
        affordable = self.count_affordable_block_passes(self.setup.recipe.train.steps - self.start_step)
        # One pass of the kernel is compared with the reference, and at least one with the kernel itself.
        return min(MIN_PASSES, max(2, affordable - 1))

    def count_affordable_block_passes(self, num_steps: int) -> int:
        """Number of block passes that the comparison of each kernel may take in a run of so many steps."""
        train = self.setup.recipe.train
        # Kernels are compared on at least `MIN_SAMPLES` samples, also if a step has fewer.
        steps_of_compared_batch = num_steps * train.accumulate * train.batch_size / max(MIN_SAMPLES, train.batch_size)
        num_blocks = sum(map(is_list_element, find_blocks(self.setup.transformer)))
        num_kernels = sum(switch.parent is None for switch in self.fallbacks)
        return count_affordable_block_passes(steps_of_compared_batch, max(1, num_blocks), max(1, num_kernels))

    def select_block_per_kind(self) -> set[str]:
        """Names of the blocks to compare: one of every kind that any rank has. The same on all ranks. Collective."""
        local_names = select_block_per_kind(self.setup.transformer, self.blocks, self.block_calls, self.replaced_ops)
        names_by_rank: list[list[str]] = gather_object([local_names])
        return {name for names in names_by_rank for name in names}

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks that contain a fused op; of all blocks if a fallback concerns more than fused ops."""
        names, replaced_modules = find_blocks(self.setup.transformer), [module for _, module in self.replaced_ops]
        fused_op_names = {*OPS, ATTENTION, KERNELS, COMPILE}
        if any(s.name.partition(":")[0] not in fused_op_names for s in self.fallbacks):
            return names
        return [name for name in names if any(_contains_module(name, module) for module in replaced_modules)]

    def iterate_differing_kernels(
        self, micro_batches: Sequence[MicroBatch], num_passes: int
    ) -> Iterator[tuple[Fallback, KernelDifference, int]]:
        """Yield (switch, difference, rank) for each kernel that differs on any rank. Collective.

        Switch it off before requesting the next. `num_passes` is the minimum number of block passes that test whether
        a kernel repeats itself.
        """
        self.coverage = ComparisonCoverage()
        self.selected_blocks = self.blocks if self.selected_blocks is None else self.selected_blocks
        ranks: dict[str, int] = {}

        def compare_on_micro_batches(
            fallback: Fallback, other_fallbacks: Sequence[Fallback]
        ) -> KernelDifference | None:
            for index, micro_batch in enumerate(micro_batches):
                # The first batch tests whether a kernel repeats itself. A kernel with occasional errors needs more
                # passes when tested by itself, to be caught as it was among all.
                passes = 0 if index else 4 * MIN_PASSES if fallback.parent else num_passes
                difference = self._compare_kernel(micro_batch, fallback, other_fallbacks, passes)
                # A kernel may be wrong on a single GPU: all ranks must switch it off together.
                by_rank: list[KernelDifference | None] = gather_object([difference])
                first_found = next(((r, d) for r, d in enumerate(by_rank) if d is not None), None)
                if first_found is not None:
                    ranks[fallback.name] = first_found[0]
                    return first_found[1]
            return None

        for switch, difference in iter_differences(self.fallbacks, compare_on_micro_batches):
            yield switch, difference, ranks[switch.name]
        by_rank: list[ComparisonCoverage] = gather_object([self.coverage])
        # A block counts as compared only if every rank did: each GPU runs its own copy of the kernel.
        compared = set.intersection(*(coverage.compared for coverage in by_rank))
        missed = {name: reason for coverage in by_rank for name, reason in coverage.skipped.items()}
        modules = [module for _, module in self.replaced_ops]
        # A missed block matters only if a replaced op is inside it.
        relevant = {n for n in missed if not modules or any(_contains_module(n, module) for module in modules)}
        self.coverage = ComparisonCoverage(compared, {n: missed[n] for n in relevant - compared})

    def _compare_kernel(
        self, micro_batch: MicroBatch, fallback: Fallback, other_fallbacks: Sequence[Fallback], num_passes: int
    ) -> KernelDifference | None:
        model = self.setup.transformer
        in_blocks = fallback.name != COMPILE and (fallback.cause == "kernel" or fallback.parent)
        if fallback.name == COMPILE and self.setup.recipe.train.batch_size == 1:
            # For two samples it would be compiled once more.
            micro_batch = micro_batch.select_sample(0)
        # The unpatched model may need more memory than the chosen checkpointing mode allows for.
        mode = "none" if in_blocks else choose_least_memory_mode(model)
        settings = ComparisonOptions(self.trained_inputs, self.coverage, num_passes, self.selected_blocks)
        try:
            with use_checkpointing_mode(model, mode):
                return find_first_difference(
                    fallback,
                    lambda: micro_batch.forward().losses,
                    model,
                    disabled_fallbacks=other_fallbacks,
                    options=settings,
                )
        except torch.OutOfMemoryError:
            self.coverage.skipped[""] = _NO_MEMORY
            return None

    @property
    def replaced_ops(self) -> list[tuple[str, str]]:
        """Pairs of a fused op and the module in which it was replaced."""
        fusion = get_fusion(self.setup.transformer)
        return fusion.patched_modules if fusion is not None else []

    def find_uncompared_kernels(self) -> list[tuple[Fallback, str]]:
        """The active kernels that no comparison reached, each with a reason."""
        compared, missed = self.coverage.compared, self.coverage.skipped
        reason = next(iter(missed.values()), "no sample's forward pass reached it")
        unreached = []
        for switch in self.fallbacks:
            modules = [module for op, module in self.replaced_ops if op == switch.name]
            reached = [m for m in modules if any(_contains_module(block, m) for block in compared)]
            # A switch that has parts is compared through them.
            is_whole = any(part.parent == switch.name for part in self.fallbacks)
            if not is_whole and not (reached if modules else compared):
                unreached.append((switch, reason))
        return unreached

    def describe_affected_steps(self, step: int) -> str:
        """The steps that may have been trained with a kernel found wrong after `step`, as text; "" if none."""
        passed = self.recovery.state.passed
        if step == 0 or passed == step:
            return ""
        first_step = 1 if passed is None else passed + 1
        return f"; steps {first_step} to {step} may have been trained with it, and are not repeated"

    def _take_snapshot(self, step: int) -> None:
        self.recovery.state.passed = step
        if self._good_state is not None:
            self._good_state.take_snapshot(step)

    def _disable_wrong_kernels(self, step: int, wrong_kernels: list[Any], seconds: float) -> None:
        recovery, actions = self.recovery, self.setup.recipe.guard.on_nonfinite
        # A rollback needs a state to return to, and a fallback must be allowed at all; else the run stops.
        target = self._good_state.find_finite_step() if self._good_state and "rollback" in actions else None
        action = "fallback" if target is None else "rollback"
        action = action if "fallback" in actions else "stop"
        lines, events = [], []
        for name, difference, rank in wrong_kernels:
            message_text = f"{difference.message}; switched off for this run"
            if action != "rollback":
                message_text += self.describe_affected_steps(step)
            event = make_kernel_event(
                step, "parity", message_text, name, module=difference.module, action=action, rank=rank, seconds=seconds
            )
            events.append(event)
            lines.append(message_text)
            recovery.files.write_event(event)
        consequence = f"rolled back to step {target}, where it was correct" if target is not None else ""
        if action == "stop":
            message = format_list(f"step {step}: a kernel is faulty", lines)
            raise NonFiniteError(
                f"{message}\nstopped, because guard.on_nonfinite has no fallback", events[0].to_record()
            )
        summary = f"guard: step {step}: a kernel is faulty; {consequence or 'training continues'}"
        recovery.files.say(format_list(summary, lines))
        # Without the kernel, more is kept for backward.
        choose_checkpointing(self.setup)
        if self._good_state is not None and target is not None:
            self._good_state.restore_snapshot(target)
            raise RolledBackError(target)


def _contains_module(block: str, module: str) -> bool:
    return block in ("", module) or module.startswith(f"{block}.")


def choose_blocks(names: Sequence[str], offset: int) -> tuple[set[str], int]:
    """Choose blocks to compare: those not repeated, the first and last repeated ones, and a few others in turn.

    Returns the names and the next `offset`.
    """
    repeated = [name for name in names if is_list_element(name)]
    if len(repeated) <= _MAX_BLOCKS:
        return {*names}, offset
    # The first and the last are in every comparison; the others take turns.
    between, count = repeated[1:-1], _MAX_BLOCKS - 2
    chosen = {between[(offset + k) % len(between)] for k in range(count)}
    return {*names} - ({*between} - chosen), offset + count
