"""Builds a run's guard: the components that it may switch off, its quarantine, recovery and per-step monitoring."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.data.loading.quarantine import QUARANTINE_FILE, Quarantine
from dit_lora.errors import DitLoraError, format_list
from dit_lora.fuse.gradient_norms import NormFunction, choose_norm_function
from dit_lora.guard.fallbacks import find_fallback, list_fallbacks
from dit_lora.guard.frozen_weights import FrozenWeightDigests
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.recovery import Policy
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.spikes import SpikeDetector
from dit_lora.guard.state_checks import compute_weight_peak
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.recovery.diagnosis_context import RunDiagnosisContext
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import GuardState, InitialGuardState, RecoveryFileUpdater, RunRecovery
from dit_lora.training.session.session import raise_errors_on_all_ranks
from dit_lora.training.task import AnySetup


def load_guard_state(setup: AnySetup, record: Mapping[str, Any]) -> InitialGuardState:
    """Restore the guard's state from a checkpoint (empty at a first start).

    Fallbacks that were off then are switched off again.
    """
    switches = list_fallbacks(setup.transformer)
    state = GuardState(**record.get("state", {}), **record.get("parity", {}))
    in_use = {switch.name for switch in switches}
    # A known fault stays switched off: otherwise each resume would run into it again.
    for name in state.switched_off:
        # On another machine, or if the recipe has it off now, there is nothing to switch off.
        if name not in in_use:
            continue
        find_fallback(switches, name).disable()
        setup.session.say(f"guard: {name} stays off, because it was faulty earlier in this run")
    weights = get_trainable_parameters(setup.transformer).values()
    policy = Policy(setup.recipe.guard.recovery_config, **record.get("policy", {}))
    quarantine = _load_quarantine(setup)
    # Kept from the first start: slow growth of the weights must not raise the limit.
    peak = record.get("start_peak") or compute_weight_peak(weights, all_ranks=setup.engine.collective_forward)
    return InitialGuardState(state, policy, switches, quarantine, peak)


def build_recovery(
    setup: AnySetup,
    ema: TrainedEMA | None,
    guard_start: InitialGuardState,
    snapshots: Snapshots,
    files: RecoveryFileUpdater,
) -> RunRecovery:
    """Build the handler that diagnoses failed steps and recovers from them; `files` are the run's."""
    transformer, engine = setup.transformer, setup.engine
    return RunRecovery(
        diagnosis_context=RunDiagnosisContext(
            model=transformer,
            fallbacks=guard_start.fallbacks,
            start_peak=guard_start.start_peak,
            max_magnitude=MAX_ABS,
            collective_forward=engine.collective_forward,
            # Digests of the bits: a norm would miss a flipped sign, and a sum two exchanged rows.
            frozen_record=FrozenWeightDigests(transformer),
            disabled_names=guard_start.state.switched_off,
            setup=setup,
            ema=ema,
            snapshots=snapshots,
            quarantine=guard_start.quarantine,
        ),
        engine=engine,
        policy=guard_start.policy,
        state=guard_start.state,
        quarantine=guard_start.quarantine,
        order=setup.data.training_set.build_order(
            seed=setup.recipe.train.seed,
            quarantine=guard_start.quarantine,
            samples_per_step=setup.session.samples_per_step,
        ),
        snapshots=snapshots,
        samples_per_step=setup.session.samples_per_step,
        files=files,
    )


def build_watcher(setup: AnySetup, snapshots: Snapshots) -> StepMonitor:
    """Build the per-step monitoring that the recipe's `guard` section asks for."""
    config = setup.recipe.guard
    monitor, spikes = None, None
    if config.monitor_every:
        monitor = Monitor(setup.transformer, interval_steps=config.monitor_every)
    if config.spike_threshold is not None:
        spikes = SpikeDetector(window=config.spike_window, threshold=config.spike_threshold)
    return StepMonitor(snapshots, monitor, spikes, config.adaptive_clip)


def choose_gradient_norm_function(setup: AnySetup) -> NormFunction | None:
    """The function that computes gradient norms; None for PyTorch.

    It is equal on all ranks, or clipping would make weights differ.
    """
    norms, reason_off = None, None
    trained = [p for group in setup.optimizer.param_groups for p in group["params"]]
    # Agree on errors first: a rank with an error would never reach the gather below.
    with raise_errors_on_all_ranks(setup.session.accelerator):
        norms, reason_off = choose_norm_function(setup.recipe.kernels.finite_norm, trained)
    # If one rank cannot use the kernel, all ranks use PyTorch.
    reasons = [reason for reason in gather_object([reason_off]) if reason is not None]
    if torch.cuda.is_available() and reasons:
        setup.session.say(f"kernels: finite_norm is off: {reasons[0]}")
    return None if reasons else norms


def _load_quarantine(setup: AnySetup) -> Quarantine:
    """Load this run's list of left-out samples; a new list starts from the one that `guard.quarantine` names."""
    # The run's own list wins over the recipe's: it also has what this run has left out.
    own_list = setup.session.dir / QUARANTINE_FILE
    source_path = setup.recipe.guard.quarantine
    quarantine = Quarantine.load(own_list)
    if quarantine.records:
        permanent = [record for record in quarantine.records if record.to_epoch is None]
        lines = [f"{record.sample_id}: {record.cause}: {record.reason}" for record in permanent]
        summary = (
            f"guard: {len(permanent)} samples left out permanently, {len(quarantine.records) - len(permanent)} "
            f"for one epoch; to list or release them, run dit-lora quarantine {setup.session.dir}"
        )
        setup.session.say(format_list(summary, lines))
    if quarantine.num_torn_lines:
        setup.session.say(f"warning: {own_list}: skipped {quarantine.num_torn_lines} incomplete line(s)")
    if source_path is None:
        return quarantine
    if own_list.exists():
        setup.session.say(f"guard.quarantine is ignored, because the run has its own list, {own_list}")
        return quarantine
    if not Path(source_path).exists():
        raise DitLoraError(f"guard.quarantine: {source_path} does not exist")
    ids = {entry.id for entry in setup.data.training_set.entries}
    earlier = [record for record in Quarantine.load(Path(source_path)).records if record.to_epoch is None]
    # From the first epoch on: this run has not used them yet.
    quarantine.add([replace(record, from_epoch=0, from_copy=0) for record in earlier if record.sample_id in ids])
    remaining = ids - {record.sample_id for record in quarantine.records}
    if not remaining:
        raise DitLoraError(f"guard.quarantine: {source_path} leaves out all {len(ids)} samples")
    setup.session.say(
        f"guard: {len(quarantine.records)} of {len(ids)} samples are left out, as listed in {source_path}"
    )
    return quarantine
