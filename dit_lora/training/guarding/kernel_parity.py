"""Compares a run's fused kernels with the stock model on its own samples, and switches off what differs."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.fuse.patches import ATTENTION, KERNELS, OPS, fusion_of
from dit_lora.guard.block_parity import PASSES, Coverage, How, Learning, blocks_of
from dit_lora.guard.parity import Difference, differences, first_difference
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.switches import COMPILE, Switch
from dit_lora.numerics.streams import fold
from dit_lora.training.execution.activation_checkpointing import in_mode, least_memory
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.micro_batch import Place, replayable, sample_losses
from dit_lora.training.task import AnySetup

ROWS = 2
"""The fewest samples of a comparison: a kernel that gives every sample the first one's tables is right for one."""
_NO_MEMORY = "there was no memory for it"


@dataclass
class KernelParity:
    """Compares a run's kernels; what it knows of the model stays from one comparison to the next."""

    setup: AnySetup
    recovery: RunRecovery
    learning: Learning | None = None
    """Tells which inputs of the model's blocks have a gradient in training."""
    only: Collection[str] | None = None
    """Names of the blocks that are compared, where not all are."""
    coverage: Coverage = field(default_factory=Coverage)
    """The blocks that the last comparison reached, over all ranks."""

    @property
    def switches(self) -> list[Switch]:
        """Switches that are compared: kernels that are on, and attention backends that the recipe names."""
        off = self.recovery.state.switched_off
        switches = self.recovery.suspects.switches
        on = [switch for switch in switches if not {switch.name, switch.part_of} & {*off}]
        return [switch for switch in on if switch.cause == "kernel" or switch.insisted]

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks in which a kernel replaced something; of all, with a switch of another kind."""
        names, places = blocks_of(self.setup.transformer), [module for _, module in self._places]
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
        places = [module for _, module in self._places]
        telling = {n for n in missed if not places or any(_holds(n, m) for m in places)}
        self.coverage = Coverage(compared, {n: missed[n] for n in telling - compared})

    @property
    def _places(self) -> list[tuple[str, str]]:
        """Pairs of an op and the module in which it replaced something."""
        fusion = fusion_of(self.setup.transformer)
        return fusion.replaced if fusion is not None else []

    def not_compared(self) -> list[tuple[Switch, str]]:
        """Return the kernels that are on and that no comparison reached, and why."""
        compared, missed = self.coverage.compared, self.coverage.missed
        why = next(iter(missed.values()), "no sample's forward pass reached it")
        left = []
        for switch in self.switches:
            modules = [module for op, module in self._places if op == switch.name]
            reached = [m for m in modules if any(_holds(block, m) for block in compared)]
            is_whole = any(one.part_of == switch.name for one in self.switches)
            if not is_whole and not (reached if modules else compared):
                left.append((switch, why))
        return left


def _holds(block: str, module: str) -> bool:
    return block in ("", module) or module.startswith(f"{block}.")


def several_rows(batch: Batch, others: Sequence[Batch] = ()) -> Batch:
    """Return the batch with `ROWS` samples at least: with one of `others` if shapes agree, else its own drawn again."""
    if len(batch.ids) >= ROWS:
        return batch
    shapes = {name: tensor.shape[1:] for name, tensor in batch.tensors.items()}
    fitting = [
        one.single(0)
        for one in others
        if one.ids[0] != batch.ids[0]
        and {name: tensor.shape[1:] for name, tensor in one.tensors.items()} == shapes
    ]
    again = replace(batch, draws=tuple(fold(draw, "redrawn", 0) for draw in batch.draws))
    return collate([batch, *fitting[:1], again][:ROWS])


def micro_batch_of(setup: AnySetup, batch: Batch) -> MicroBatch:
    """Return the batch as a comparison runs it, which is at no step."""
    on_device = batch.to(setup.session.accelerator.device)
    rank = 0 if setup.engine.lockstep else setup.session.accelerator.process_index
    place = Place(setup.recipe.train.seed, 0, 0, rank)
    return replayable(sample_losses(setup.checkpoint), setup.transformer.train(), on_device, place)


def samples_of(setup: AnySetup, entries: Sequence[Any], count: int) -> list[Batch]:
    """Return as many good samples of these entries, each with a draw of its own: a clip comes again if there are too few."""
    good: list[tuple[Any, Batch]] = []
    for entry in entries:
        if len(good) == count:
            break
        sample = setup.data.clips.sample(entry, len(good))
        if not sample.faults:
            good.append((entry, sample))
    samples = [sample for _, sample in good]
    while good and len(samples) < count:
        entry, _ = good[len(samples) % len(good)]
        samples.append(setup.data.clips.sample(entry, len(samples)))
    return samples


def kept_entries(setup: AnySetup, quarantine: Quarantine) -> list[Any]:
    """Return the entries that the run does not leave out."""
    left_out = {one.sample_id for one in quarantine.records}
    return [entry for entry in setup.data.clips.entries if entry.id not in left_out]


def compared_batches(setup: AnySetup, quarantine: Quarantine) -> list[Batch]:
    """Return several samples of the largest bucket, of the one with the most, and of each kind of sample."""
    trained_on, size = kept_entries(setup, quarantine), max(ROWS, setup.recipe.train.batch_size)
    counts = Counter(entry.shape for entry in trained_on)
    if not counts:
        return []
    largest = max(counts, key=lambda shape: shape.volume)
    kinds = [[entry] for entry in setup.data.clips.one_of_each_kind()]
    groups = [
        [e for e in trained_on if e.shape == shape] for shape in (largest, _most_common(counts))
    ]
    if groups[0] == groups[1]:
        groups.pop()
    batches = [samples_of(setup, entries, size) for entries in groups]
    batches += [samples_of(setup, entries, size) for entries in kinds]
    return [collate(samples) for samples in batches if samples]


def _most_common(counts: Counter[Any]) -> Any:
    return max(counts, key=lambda shape: (counts[shape], shape.volume))


def make_batches(setup: AnySetup, quarantine: Quarantine) -> list[MicroBatch]:
    """Take equally many of `compared_batches` on every rank, and in lockstep the same ones."""
    choices = [compared_batches(setup, quarantine)]
    if setup.engine.lockstep:
        broadcast_object_list(choices)
    # Each comparison gathers: a rank with more batches would wait for the others for ever.
    count = min(gather_object([len(choices[0])]))
    return [micro_batch_of(setup, batch) for batch in choices[0][:count]]


def turn_off(recovery: RunRecovery, switch: Switch) -> None:
    """Turn a switch off for the rest of the run, and for those that resume it."""
    switch.turn_off()
    recovery.state.switched_off.append(switch.name)
