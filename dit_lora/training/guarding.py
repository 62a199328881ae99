"""Puts a run's guard together: what it may suspect and switch off, its snapshots, its files."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

from dit_lora.config import Recipe
from dit_lora.data.cache import MAX_ABS
from dit_lora.data.media import UnreadableError
from dit_lora.data.quarantine import QUARANTINE, Quarantine
from dit_lora.data.sources import class_names
from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.norms import Norms, choose_norms
from dit_lora.numerics.finite import describe_all, not_finite
from dit_lora.numerics.frozen import FrozenRecord
from dit_lora.numerics.gate import PoisonedStateError
from dit_lora.numerics.monitor import Monitor
from dit_lora.numerics.policy import Policy
from dit_lora.numerics.replay import MicroBatch
from dit_lora.numerics.shards import local
from dit_lora.numerics.snapshot import Snapshots
from dit_lora.numerics.spikes import SpikeDetector
from dit_lora.numerics.state import altered_state, decay_share, has_run_away, weight_peak
from dit_lora.numerics.streams import fold
from dit_lora.numerics.suspects import Suspects
from dit_lora.numerics.switches import all_switches, find_switch
from dit_lora.terminal import printable
from dit_lora.training.best import note_best
from dit_lora.training.checkpoint import (
    checkpoint_steps,
    remove_checkpoints_after,
    trainable_state,
)
from dit_lora.training.engine import Engine
from dit_lora.training.recovery import GuardState, RunRecovery
from dit_lora.training.replay import (
    Parts,
    Place,
    keep_bundle,
    parts_of,
    replayable,
    sample_losses,
    together,
)
from dit_lora.training.runtime import agree
from dit_lora.training.watch import StepWatcher

if TYPE_CHECKING:
    from dit_lora.training.run import Run

_CANDIDATES = 4  # samples that are read to find one to compare with


def build_guard(
    run: "Run", changed: Mapping[str, Any], save: Callable[[int], None]
) -> tuple[RunRecovery, StepWatcher]:
    """The guard and the watcher of a run; `changed` is a checkpoint's `guard_record`, `save` writes one."""
    recipe, transformer = run.recipe, run.transformer
    config = recipe.guard
    switches = all_switches(transformer)
    state = GuardState(**changed.get("state", {}))
    in_use = {switch.name for switch in switches}
    for name in state.switched_off:
        if name not in in_use:  # another machine, or the recipe has it off now
            continue
        find_switch(switches, name).turn_off()
        run.runtime.say(f"guard: {name} stays off: an earlier verdict of this run")
    snapshots = Snapshots(
        lambda: own_state(run),
        every=config.snapshot_every,
        put=run.engine.put_numbers,
    )
    quarantine = _quarantine(run)
    recovery = RunRecovery(
        suspects=Suspects(
            model=transformer,
            optimizer_state=lambda: (
                run.engine.own_moments() | (run.ema.tensors() if run.ema else {})
            ).items(),
            switches=switches,
            start_peak=changed.get("start_peak")
            or weight_peak(trainable_state(transformer).values(), together=run.engine.lockstep),
            limit=MAX_ABS,
            lockstep=run.engine.lockstep,
            frozen=FrozenRecord(transformer),
            peaks=snapshots.peaks,
            switched_off=state.switched_off,
            decay=lambda: decay_share(run.optimizer.param_groups),
            another=lambda wanted, without: _another_sample(run, wanted, without),
        ),
        policy=Policy(config, **changed.get("policy", {})),
        state=state,
        quarantine=quarantine,
        order=run.data.clips.order(
            seed=recipe.train.seed, quarantine=quarantine, group=run.runtime.samples_per_step
        ),
        snapshots=snapshots,
        drop_state=run.engine.forget,
        samples_per_step=run.runtime.samples_per_step,
        files=_Files(run, save),
        share=lambda own, owner: _shared(run, own, owner),
    )
    watcher = StepWatcher(
        snapshots,
        Monitor(transformer, every=config.monitor_every) if config.monitor_every else None,
        _spikes(run),
        config.adaptive_clip,
    )
    return recovery, watcher


def own_state(run: "Run") -> dict[str, torch.Tensor]:
    """What training changes, live: weights, the optimizer's state and the averages; of what is sharded, this rank's."""
    return run.engine.own_state() | (run.ema.tensors() if run.ema else {})


def chosen_norms(run: "Run") -> Norms | None:
    """What computes the run's gradient norms; equal on all ranks, or clipping would make their weights differ."""
    error, norms, why = None, None, None
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    try:
        norms, why = choose_norms(run.recipe.kernels.finite_norm, trained)
    except DitLoraError as problem:
        error = problem
    agree(run.runtime.accelerator, error)
    reasons = [reason for reason in gather_object([why]) if reason is not None]
    run.runtime.say(f"kernels: finite_norm: {reasons[0] if reasons else 'on' if norms else 'off'}")
    return None if reasons else norms


def guard_record(guard: RunRecovery) -> dict[str, Any]:
    """What a checkpoint keeps of the guard."""
    return {
        "state": asdict(guard.state),
        "policy": guard.policy.state(),
        "start_peak": guard.suspects.start_peak,
    }


def require_finite_everywhere(
    accelerator: Accelerator, state: Mapping[str, torch.Tensor], step: int
) -> None:
    """Raise `PoisonedStateError` on every rank if any rank's state is not finite."""
    own = {
        name: local(tensor.detach()) for name, tensor in state.items()
    }  # other ranks have theirs
    floats = [tensor for tensor in own.values() if tensor.is_floating_point()]
    device = floats[0].device  # numbers of the optimizer's are on the CPU
    norms = torch.stack(
        [norm.float().to(device) for norm in torch._foreach_norm(floats, float("inf"))]
    )
    is_bad = not torch.isfinite(norms).all()  # one read; the names only if there is need
    found = gather_object(not_finite(own.items()) if is_bad else [])
    if found:
        message = listed(f"step {step} is not saved: it is not finite", found[:20])
        raise PoisonedStateError(message, "non_finite_weights")


def require_unaltered(
    accelerator: Accelerator, suspects: Suspects, step: int, *, frozen: bool
) -> None:
    """Raise `PoisonedStateError` on every rank if on any memory has altered what is trained, or what must not change.

    The frozen weights and buffers are compared where `frozen`: that reads all of them.
    """
    found = altered_state(suspects)
    if frozen and suspects.frozen is not None:
        found += suspects.frozen.changed()
    found = gather_object(found)
    if found:
        message = listed(f"step {step} is not saved: it was altered", found[:20])
        raise PoisonedStateError(message, "altered_state")


def require_not_lost(engine: Engine, start: float, step: int) -> None:
    """Raise `PoisonedStateError`, equally on all ranks, if trained weights ran away though they are finite."""
    peak = weight_peak(trainable_state(engine.bare).values(), together=engine.lockstep)
    if has_run_away(peak, start):
        raise PoisonedStateError(
            f"step {step}: trained weights reach {peak:.3g}", "diverged_weights"
        )


def _quarantine(run: "Run") -> Quarantine:
    """This run's list, begun with the one that `guard.quarantine` names."""
    own = run.runtime.dir / QUARANTINE
    given = run.recipe.guard.quarantine
    quarantine = Quarantine.load(own)
    if quarantine.records:
        run.runtime.say(_says_who_is_out(quarantine, run.runtime.dir))
    if quarantine.torn:
        run.runtime.say(f"warning: {own}: passed over {quarantine.torn} torn line(s)")
    if given is None:
        return quarantine
    if own.exists():
        run.runtime.say(f"guard.quarantine is not read: the run has its own list, {own}")
        return quarantine
    if not Path(given).exists():
        raise DitLoraError(f"guard.quarantine: {given} does not exist")
    known = {entry.id for entry in run.data.clips.entries}
    earlier = [one for one in Quarantine.load(Path(given)).records if one.to_epoch is None]
    quarantine.add(
        [
            type(one)(**{**asdict(one), "from_epoch": 0, "from_copy": 0})
            for one in earlier
            if one.sample_id in known
        ]
    )
    left = known - {one.sample_id for one in quarantine.records}
    if not left:
        raise DitLoraError(f"guard.quarantine: {given} leaves out all {len(known)} samples")
    run.runtime.say(
        f"guard: {len(quarantine.records)} of {len(known)} samples left out, by {given}"
    )
    return quarantine


def _says_who_is_out(quarantine: Quarantine, folder: Path) -> str:
    """Tell a resumed run's user whom it leaves out and why; what was skipped for an epoch by its number."""
    for_good = [one for one in quarantine.records if one.to_epoch is None]
    once = len(quarantine.records) - len(for_good)
    counts = f"guard: {len(for_good)} left out for good, {once} for an epoch"
    lines = [f"{one.sample_id}: {one.cause}: {one.reason}" for one in for_good]
    return listed(f"{counts}; dit-lora quarantine {folder} shows and undoes it", lines)


def prime_spikes(run: "Run") -> None:
    """A spike detector that has seen what metrics.jsonl holds, and nothing else. Collective."""
    if run.recipe.guard.spike_threshold is None:
        return
    lines: list[Any] = [run.journal.history() if run.journal is not None else None]
    broadcast_object_list(lines)
    run.watcher.spikes = _spikes(run)
    run.watcher.prime(lines[0])


def _spikes(run: "Run") -> SpikeDetector | None:
    config = run.recipe.guard
    if config.spike_threshold is None:
        return None
    return SpikeDetector(window=config.spike_window, threshold=config.spike_threshold)


def _another_sample(run: "Run", wanted: MicroBatch, without: Collection[str]) -> MicroBatch | None:
    """One sample of the data at the wanted micro-batch's place, none of those named; equal on all ranks.

    Of the same bucket where one is, for a step of that size fits into memory; read anew, and only if it is good.
    """
    entries = {entry.id: entry for entry in run.data.clips.entries}
    out = {one.sample_id for one in run.guard.quarantine.records} | {*without}
    bucket = entries[wanted.ids[0]].shape if wanted.ids[0] in entries else None
    place = Place(run.recipe.train.seed, wanted.step, wanted.micro_step, wanted.rank)
    candidates = [one for one in entries.values() if one.id not in out and one.shape == bucket]
    for entry in candidates[:_CANDIDATES]:
        try:
            batch = run.data.clips.sample(entry, fold(place.seed, "control", entry.id))
        except UnreadableError:  # another serves as well, and other ranks wait for this one
            continue
        if not batch.faults and not describe_all(batch.tensors, MAX_ABS):
            batch = batch.to(run.runtime.accelerator.device)
            return replayable(sample_losses(run.checkpoint), run.transformer, batch, place)
    return None


def _whole_recipe(run: "Run", micro_batch: MicroBatch) -> Recipe:
    """The recipe, with the names of its classes: a replay has no data to read them from."""
    recipe = run.recipe
    if "class_labels" not in micro_batch.tensors:
        return recipe
    names = tuple(class_names(recipe.data, recipe.cache_dir))
    data = recipe.data.model_copy(update={"classes": names})
    return recipe.model_copy(update={"data": data})


def _shared(run: "Run", own: MicroBatch | None, owner: int) -> MicroBatch | None:
    """The micro-batch of rank `owner` on every rank, for all to run it. Collective."""
    parts: list[Parts | None] = [parts_of(own) if own is not None else None]
    broadcast_object_list(parts, from_process=owner)
    if own is not None or parts[0] is None:
        return own
    device = run.runtime.accelerator.device
    losses, seed = sample_losses(run.checkpoint), run.recipe.train.seed
    return together(parts[0], losses, run.transformer, seed, device)


class _Files:
    """A run's folder, for `RunRecovery`."""

    def __init__(self, run: "Run", save: Callable[[int], None]) -> None:
        self.run = run
        self.save = save
        self._bundles = len(list((run.runtime.dir / "bundles").glob("step_*")))

    def event(self, event: dict[str, Any]) -> None:
        if self.run.journal is not None:
            self.run.journal.event(event)

    def rewind(self, step: int, *, other_trajectory: bool) -> None:
        if self.run.journal is not None:
            self.run.saver.wait()  # a checkpoint under way may be one of those
            with self.run.saver.noted():
                self.run.journal.rewind(step)
                if other_trajectory:
                    remove_checkpoints_after(self.run.runtime.dir, step)
            note_best(self.run, step)
        prime_spikes(self.run)

    def quarantined(self, quarantine: Quarantine) -> None:
        if self.run.runtime.is_main:
            with self.run.saver.noted():
                quarantine.save()

    def left_out(self, step: int) -> None:
        recipe = self.run.recipe
        if step % recipe.train.save_every == 0 or step == recipe.train.steps:
            self.save(step)

    def set_aside_bad(self, samples: Sequence[str]) -> list[str]:
        if not self.run.runtime.is_main:
            return []
        aside = self.run.data.clips.set_aside_bad(samples)
        return [f"set aside {path}: the next start encodes it anew" for path in aside]

    def newest_saved(self) -> int:
        steps = [0]
        if self.run.runtime.is_main:
            self.run.saver.wait()  # one may be under way
            steps = [max(checkpoint_steps(self.run.runtime.dir), default=0)]
        broadcast_object_list(steps)
        return steps[0]

    def bundle(self, micro_batch: MicroBatch, event: dict[str, Any]) -> str | None:
        """Written by the rank that ran the micro-batch, as far as `guard.bundles` goes."""
        run = self.run
        if self._bundles >= run.recipe.guard.bundles:
            return None
        self._bundles += 1
        weights = run.engine.weights()
        if run.engine.lockstep and not run.runtime.is_main:
            return None  # all ranks have the same
        place = f"rank_{micro_batch.rank}_micro_step_{micro_batch.micro_step}"
        name = f"step_{micro_batch.step:06d}_{place}"
        earlier = len(list((run.runtime.dir / "bundles").glob(f"{name}*")))  # of the same step
        folder = run.runtime.dir / "bundles" / (f"{name}_again_{earlier}" if earlier else name)
        try:
            keep_bundle(
                folder,
                micro_batch,
                event,
                weights,
                _whole_recipe(run, micro_batch),
                run.runtime.precision,
                run.data.transformer_digest,
                run.guard.state.switched_off,
                run.guard.suspects.start_peak,
            )
        except OSError as error:  # a run is worth more than a bundle
            words = f"warning: cannot write {folder}: {error.strerror}"
            tqdm.write(printable(words), file=sys.stderr)
            return None
        return f"bundles/{folder.name}"

    def say(self, line: str) -> None:
        self.run.runtime.say(line)
