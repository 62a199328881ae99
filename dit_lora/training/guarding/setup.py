"""Builds a run's guard: the components it may suspect and switch off, its snapshots and its files."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.data.loading.quarantine import QUARANTINE, Quarantine
from dit_lora.data.storage import UnreadableError
from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.gradient_norms import Norms, choose_norms
from dit_lora.guard.frozen import FrozenRecord
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.policy import Policy
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.spikes import SpikeDetector
from dit_lora.guard.state import decay_share, weight_peak
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import all_switches, find_switch
from dit_lora.numerics.finite import describe_all
from dit_lora.numerics.parameters import trainable_state
from dit_lora.numerics.streams import fold
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.guarding.files import RecoveryFiles
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.guarding.state import GuardStart, GuardState
from dit_lora.training.guarding.watch import StepWatcher
from dit_lora.training.micro_batch import Place, replayable, sample_losses, sent
from dit_lora.training.session.session import agreeing
from dit_lora.training.task import AnySetup

# Number of samples to try as a control.
_CANDIDATES = 4


def start_of_guard(setup: AnySetup, record: Mapping[str, Any]) -> GuardStart:
    """Load a checkpoint's `RunRecovery.record` (empty at a first start), and switch off again what it had switched
    off.
    """
    switches = all_switches(setup.transformer)
    state = GuardState(**record.get("state", {}), **record.get("parity", {}))
    in_use = {switch.name for switch in switches}
    # A known fault stays switched off: otherwise each resume would run into it again.
    for name in state.switched_off:
        # On another machine, or if the recipe has it off now, there is nothing to switch off.
        if name not in in_use:
            continue
        find_switch(switches, name).turn_off()
        setup.session.say(f"guard: {name} stays off: an earlier verdict of this run")
    weights = trainable_state(setup.transformer).values()
    return GuardStart(
        state,
        Policy(setup.recipe.guard.ladder, **record.get("policy", {})),
        switches,
        _quarantine(setup),
        # Kept from the first start: slow growth of the weights must not raise the limit.
        record.get("start_peak") or weight_peak(weights, together=setup.engine.lockstep),
    )


def build_recovery(
    setup: AnySetup,
    ema: TrainedEMA | None,
    start: GuardStart,
    snapshots: Snapshots,
    files: RecoveryFiles,
) -> RunRecovery:
    """Build the handler of failed steps; `files` are the run's."""
    transformer, engine = setup.transformer, setup.engine
    return RunRecovery(
        suspects=Suspects(
            model=transformer,
            optimizer_state=lambda: (engine.own_moments() | (ema.tensors() if ema else {})).items(),
            switches=start.switches,
            start_peak=start.start_peak,
            limit=MAX_ABS,
            lockstep=engine.lockstep,
            # Digests of the bits: a norm would miss a flipped sign, and a sum two exchanged rows.
            frozen=FrozenRecord(transformer),
            peaks=snapshots.peaks,
            switched_off=start.state.switched_off,
            decay=lambda: decay_share(setup.optimizer.param_groups),
            another=lambda failing, excluded: _another_sample(
                setup, start.quarantine, failing, excluded
            ),
        ),
        policy=start.policy,
        state=start.state,
        quarantine=start.quarantine,
        order=setup.data.clips.order(
            seed=setup.recipe.train.seed,
            quarantine=start.quarantine,
            group=setup.session.samples_per_step,
        ),
        snapshots=snapshots,
        drop_state=engine.forget,
        samples_per_step=setup.session.samples_per_step,
        files=files,
        share=lambda local, owner: _shared(setup, local, owner),
    )


def build_watcher(setup: AnySetup, snapshots: Snapshots) -> StepWatcher:
    """Build the per-step monitoring that the recipe's `guard` section asks for."""
    config = setup.recipe.guard
    monitor = None
    if config.monitor_every:
        monitor = Monitor(setup.transformer, every=config.monitor_every)
    spikes = None
    if config.spike_threshold is not None:
        spikes = SpikeDetector(window=config.spike_window, threshold=config.spike_threshold)
    return StepWatcher(snapshots, monitor, spikes, config.adaptive_clip)


def chosen_norms(setup: AnySetup) -> Norms | None:
    """The function for gradient norms, or None for PyTorch; equal on all ranks, or clipping would make weights
    differ.
    """
    norms, reason_off = None, None
    trained = [p for group in setup.optimizer.param_groups for p in group["params"]]
    # Agree on errors first: a rank with an error would never reach the gather below.
    with agreeing(setup.session.accelerator):
        norms, reason_off = choose_norms(setup.recipe.kernels.finite_norm, trained)
    # If one rank cannot use the kernel, all ranks use PyTorch.
    reasons = [reason for reason in gather_object([reason_off]) if reason is not None]
    setup.session.say(
        f"kernels: finite_norm: {reasons[0] if reasons else 'on' if norms else 'off'}"
    )
    return None if reasons else norms


def _quarantine(setup: AnySetup) -> Quarantine:
    """Load this run's list of excluded samples; a new list starts from the one that `guard.quarantine` names."""
    # The run's own list wins over the recipe's: it also has what this run has excluded.
    own_list = setup.session.dir / QUARANTINE
    source_path = setup.recipe.guard.quarantine
    quarantine = Quarantine.load(own_list)
    if quarantine.records:
        setup.session.say(_says_who_is_out(quarantine, setup.session.dir))
    if quarantine.torn:
        setup.session.say(f"warning: {own_list}: passed over {quarantine.torn} torn line(s)")
    if source_path is None:
        return quarantine
    if own_list.exists():
        setup.session.say(f"guard.quarantine is not read: the run has its own list, {own_list}")
        return quarantine
    if not Path(source_path).exists():
        raise DitLoraError(f"guard.quarantine: {source_path} does not exist")
    ids = {entry.id for entry in setup.data.clips.entries}
    earlier = [
        record for record in Quarantine.load(Path(source_path)).records if record.to_epoch is None
    ]
    quarantine.add(
        [
            # From the first epoch on: this run has not used them yet.
            type(record)(**{**asdict(record), "from_epoch": 0, "from_copy": 0})
            for record in earlier
            if record.sample_id in ids
        ]
    )
    remaining = ids - {record.sample_id for record in quarantine.records}
    if not remaining:
        raise DitLoraError(f"guard.quarantine: {source_path} leaves out all {len(ids)} samples")
    setup.session.say(
        f"guard: {len(quarantine.records)} of {len(ids)} samples left out, by {source_path}"
    )
    return quarantine


def _says_who_is_out(quarantine: Quarantine, folder: Path) -> str:
    """A message for a resumed run: which samples are excluded and why; the skipped ones only by number."""
    for_good = [record for record in quarantine.records if record.to_epoch is None]
    once = len(quarantine.records) - len(for_good)
    counts = f"guard: {len(for_good)} left out for good, {once} for an epoch"
    lines = [f"{record.sample_id}: {record.cause}: {record.reason}" for record in for_good]
    return listed(f"{counts}; dit-lora quarantine {folder} shows and undoes it", lines)


def _another_sample(
    setup: AnySetup, quarantine: Quarantine, wanted: MicroBatch, without: Collection[str]
) -> MicroBatch | None:
    """Find a sample to compare with, at the position of `wanted` and not in `without`; equal on all ranks.

    It is from the same bucket, because a step of that size fits into memory. It is read from the cache again, and used
    only if it is good.
    """
    entries = {entry.id: entry for entry in setup.data.clips.entries}
    excluded = {entry.sample_id for entry in quarantine.records} | {*without}
    # Without a bucket no candidate matches, and there is no control.
    bucket = entries[wanted.ids[0]].shape if wanted.ids[0] in entries else None
    position = Place(setup.recipe.train.seed, wanted.step, wanted.micro_step, wanted.rank)
    candidates = [
        record
        for record in entries.values()
        if record.id not in excluded and record.shape == bucket
    ]
    for entry in candidates[:_CANDIDATES]:
        try:
            batch = setup.data.clips.sample(entry, fold(position.seed, "control", entry.id))
        # Try another one: the other ranks wait for this rank.
        except UnreadableError:
            continue
        # A bad control would hide the fault of the sample that it is compared with.
        if not batch.faults and not describe_all(batch.tensors, MAX_ABS):
            batch = batch.to(setup.session.accelerator.device)
            return replayable(sample_losses(setup.checkpoint), setup.transformer, batch, position)
    return None


def _shared(setup: AnySetup, own: MicroBatch | None, owner: int) -> MicroBatch | None:
    """Send the micro-batch of rank `owner` to every rank. Collective."""
    seed = setup.recipe.train.seed
    # Sent from the rank `owner`; the other ranks pass None.
    (parts,) = broadcast_object_list([sent(own, seed) if own is not None else None], owner)
    if own is not None or parts is None:
        return own
    batch, position = parts
    batch = batch.to(setup.session.accelerator.device)
    return replayable(sample_losses(setup.checkpoint), setup.transformer, batch, position)
