"""Recovery of a run: `RunRecovery` diagnoses a failed step on every rank, acts on the cause, and continues or stops.

`RecoveryHandler.diagnose_and_recover` (guard/recovery.py) calls its methods in order. The quarantine, events,
bundles, checkpoints and logs of the run's folder are changed through `RecoveryFileUpdater`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm

from dit_lora.data.loading.order import SampleOccurrence, SampleOrder
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord
from dit_lora.data.sources.scan import find_class_names_in_data
from dit_lora.environment.versions import probe_environment
from dit_lora.errors import DitLoraError, format_event_kind, format_list
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.diagnosis import Diagnosis, DiagnosisContext, Event, make_event
from dit_lora.guard.fallbacks import Fallback, find_fallback
from dit_lora.guard.finite_gate import NonFiniteError, StepFailure
from dit_lora.guard.gradient_check.ranks import gather_or_raise
from dit_lora.guard.recovery import (
    BAD_STATE_KINDS,
    STATE_CAUSES,
    Action,
    Policy,
    RankDiagnosis,
    RecoveryHandler,
    format_diagnosis_lines,
)
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.repro_bundle import write_replay_bundle
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.state_checks import diagnose_diverged_weights, find_bad_state
from dit_lora.numerics.precision import DTYPES
from dit_lora.numerics.ranks import broadcast_object, gather_object
from dit_lora.terminal import make_printable
from dit_lora.training.checkpoint_state import CheckpointManager
from dit_lora.training.checkpoints.files import checkpoint_path, list_checkpoints, remove_checkpoints_after
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.journal import Journal
from dit_lora.training.recovery.cross_rank_replay import replay_on_other_ranks
from dit_lora.training.recovery.monitoring import StepMonitor, share_spike_history

_MEASUREMENTS = ("replays", "control", "control_with_the_same_draws", "losses")
"""Evidence of a diagnosis that is written to the quarantine file."""
_LEFT_OUT_TEXTS = {
    "skip": (
        "the step is repeated without the sample, which returns in the next epoch",
        "the step is repeated without {} samples, which return in the next epoch",
    ),
    "quarantine": (
        "the sample is quarantined, and the step is repeated without it",
        "{} samples are quarantined, and the step is repeated without them",
    ),
}
"""What a run does about one bad sample, and about several."""
_ACTION_TEXTS = {
    "retry": "the step is repeated",
    "fallback": "the component is switched off for this run, and the step is repeated",
    "rollback": "rolled back",
    "stop": "stopped",
}


@dataclass(frozen=True)
class RunFailure(StepFailure):
    """A failed step of a run, with everything needed to diagnose it. Equal on all ranks, except for micro-batches."""

    failed_positions: tuple[tuple[int, int], ...] = ()
    """(rank, micro-step) of micro-batches with bad loss or data; empty if the whole step failed."""
    diagnosis: Diagnosis | None = None
    """The diagnosis if the cause is already known, so that nothing is replayed; else None."""
    micro_batches: Sequence[MicroBatch] = ()
    """This rank's micro-batches of the step."""
    control: MicroBatch | None = None
    """A micro-batch of the last healthy step; None in the first step."""


@dataclass
class GuardState:
    """Changes that recovery has made to a run, saved in its checkpoints."""

    lr_scale: float = 1.0
    switched_off: list[str] = field(default_factory=list)
    passed: int | None = None
    """Step of the last comparison of kernels that found no difference, in this run or the one it resumes."""


@dataclass(frozen=True)
class InitialGuardState:
    """State of the guard when the process starts, restored from a checkpoint or new."""

    state: GuardState
    policy: Policy
    fallbacks: list[Fallback]
    quarantine: Quarantine
    start_peak: float
    """The largest trained weight before the run's first step."""


@dataclass
class RunRecovery(RecoveryHandler[RunFailure, MicroBatch]):
    """Recovery of one run from failed steps, with its list of actions. Every rank has an equal one."""

    diagnosis_context: DiagnosisContext
    engine: Engine
    policy: Policy
    state: GuardState
    quarantine: Quarantine
    order: SampleOrder
    snapshots: Snapshots
    samples_per_step: int
    files: "RecoveryFileUpdater"

    @property
    def lr_scale(self) -> float:
        """Factor of all learning rates; below 1 after a rollback that has lowered them."""
        return self.state.lr_scale

    def state_dict(self) -> dict[str, Any]:
        """The guard's recovery state, to be saved in a checkpoint."""
        state = asdict(self.state)
        return {
            "parity": {"passed": state.pop("passed")},
            "state": state,
            "policy": self.policy.state_dict(),
            "start_peak": self.diagnosis_context.start_peak,
        }

    def recover(self, failure: RunFailure) -> int:
        """Handle a failed step; returns the step to continue from. Collective.

        Raises:
            NonFiniteError: On all ranks, if no action applies.
        """
        action = self.diagnose_and_recover(failure)
        assert action.restored_step is not None  # a run's action always has a target
        return action.restored_step

    @property
    def collective_forward(self) -> bool:
        return self.diagnosis_context.collective_forward

    def diagnose_step(self, failure: RunFailure) -> list[RankDiagnosis[MicroBatch]]:
        # A failure that was diagnosed where it was detected: nothing is replayed.
        if failure.diagnosis is not None:
            return []
        # Replays on other ranks tell a bad micro-batch from a bad rank. With one rank, the diagnoses stay as they are.
        return replay_on_other_ranks(self._diagnose(failure), self.diagnosis_context, failure.kind)

    def gather_diagnoses(self, failure: RunFailure, results: Sequence[RankDiagnosis[MicroBatch]]) -> list[Diagnosis]:
        if failure.diagnosis is not None:
            return [failure.diagnosis]
        return super().gather_diagnoses(failure, results)

    def choose_action(self, failure: RunFailure, diagnoses: Sequence[Diagnosis]) -> Action:
        skipped = [record.sample_id for record in self.quarantine.records]
        return self.policy.choose_and_count_action(failure.step, diagnoses, skipped)

    def write_replay_bundle(self, source: MicroBatch, event: Event) -> str | None:
        return self.files.write_replay_bundle(source, event)

    def write_event(self, event: Event) -> None:
        self.files.write_event(event)

    def log(self, message: str) -> None:
        self.files.say(message)

    def _diagnose(self, failure: RunFailure) -> list[RankDiagnosis[MicroBatch]]:
        context = self.diagnosis_context
        if failure.kind in BAD_STATE_KINDS:
            last_batch = failure.micro_batches[-1]
            # The state is at fault, not a micro-batch; the last one only gives the diagnosis a position.
            diagnosis = find_bad_state(last_batch, context) or diagnose_diverged_weights(last_batch, context)
            diagnosis = replace(diagnosis, micro_step=None)
            shared_diagnosis = broadcast_object(diagnosis) if context.collective_forward else diagnosis
            return [RankDiagnosis(shared_diagnosis, last_batch)]
        if context.collective_forward:
            return self._diagnose_collectively(failure)
        # Each rank diagnoses its own micro-batches: those of a bad loss, or all of them after a bad gradient.
        failed_batches = [
            micro_batch
            for micro_batch in failure.micro_batches
            if not failure.failed_positions or (micro_batch.rank, micro_batch.micro_step) in failure.failed_positions
        ]
        control = failure.control
        # In the first step, use another micro-batch of the same step.
        if control is None:
            control = next((batch for batch in failure.micro_batches if batch not in failed_batches), None)
        return [
            RankDiagnosis(diagnose(batch, context, kind=failure.kind, control=control), batch)
            for batch in failed_batches
        ]

    def _diagnose_collectively(self, failure: RunFailure) -> list[RankDiagnosis[MicroBatch]]:
        """Diagnose each failed micro-batch on all ranks, one after another.

        The diagnoses are equal on all ranks except for evidence that each rank gathers by itself.
        """
        local_batches = {(batch.rank, batch.micro_step): batch for batch in failure.micro_batches}
        # Sorted: all ranks must take the same micro-batch at the same time.
        positions = failure.failed_positions or sorted(gather_object(list(local_batches)))
        control = failure.control
        if control is None:
            control = next((batch for position, batch in local_batches.items() if position not in positions), None)
        diagnosed = []
        for position in positions:
            owner, is_owner = position[0], position in local_batches
            micro_batch = self.diagnosis_context.share_micro_batch(local_batches.get(position), owner)
            shared_control = self.diagnosis_context.share_micro_batch(control if is_owner else None, owner)
            if micro_batch is None:
                raise ValueError(f"no rank has the micro-batch {position}")
            try:
                diagnosis = diagnose(micro_batch, self.diagnosis_context, kind=failure.kind, control=shared_control)
            except torch.OutOfMemoryError as error:
                # It may have left a shared forward midway: no collective is possible any more.
                raise self._report_replay_out_of_memory(failure, micro_batch) from error
            # The owner's diagnosis counts on every rank: the loop must not branch on local evidence.
            diagnosis = broadcast_object(diagnosis, owner)
            diagnosed.append(RankDiagnosis(diagnosis, micro_batch))
            if diagnosis.cause in STATE_CAUSES:
                break  # all ranks share the state: it is why the others fail
        return diagnosed

    def _report_replay_out_of_memory(self, failure: RunFailure, micro_batch: MicroBatch) -> NonFiniteError:
        """The error for a rank without memory for a replay in which other ranks take part: they may wait forever."""
        rank = PartialState().process_index
        message = (
            f"no cause found: a replay does not fit into memory next to the run on rank {rank}, and the other ranks "
            "cannot replay without it; continue with train.resume=auto and train.checkpointing=full, a smaller "
            "train.batch_size, or more ranks"
        )
        ids = micro_batch.ids
        diagnosis = Diagnosis("unknown", message, failure.step, rank, micro_batch.micro_step, sample_ids=ids)
        event = make_event(failure.step, failure.kind, diagnosis, "stop", 0.0)
        self.files.write_event(event)
        summary = f"step {failure.step}: {format_event_kind(failure.kind)}; nothing was saved at this step"
        return NonFiniteError(format_list(summary, format_diagnosis_lines([diagnosis])), event.to_record())

    def replace_impossible_action(self, failure: RunFailure, action: Action, diagnoses: Sequence[Diagnosis]) -> Action:
        """The recovery action, or `stop` if it is impossible.

        A rollback needs a finite snapshot, and the run needs a sample.
        """
        if action.kind in ("skip", "quarantine") and action.samples:
            # A sample that is left out for an epoch returns after it, so only quarantined ones count.
            quarantined = {r.sample_id for r in self.quarantine.records if r.to_epoch is None}
            if not set(self.order.ids) - quarantined - set(action.samples):
                return Action("stop", reason="no sample is left: all others are quarantined")
        if action.kind == "rollback" and not self._drop_nonfinite_snapshots():
            return Action("stop", reason="no finite snapshot is left")
        return action

    def _drop_nonfinite_snapshots(self) -> list[int]:
        """Steps of the snapshots that are finite on all ranks, ascending; drops the others. Collective."""
        # Bad on any rank counts: all ranks must restore the same step.
        for step in reversed(self.snapshots.steps):
            if gather_object(self.snapshots.find_nonfinite(step)):
                self.snapshots.drop_snapshot(step)
        return self.snapshots.steps

    def apply_action(self, failure: RunFailure, diagnoses: Sequence[Diagnosis], action: Action) -> Action:
        before = failure.step - 1
        if action.kind == "skip" and not action.samples:
            self.files.save_if_due(failure.step, self.state_dict())
            return replace(
                action, description="the step is left out, because no sample is the cause", restored_step=failure.step
            )
        if action.kind in ("skip", "quarantine"):
            notes = self._quarantine_samples(action, failure.step, diagnoses)
            single, several = _LEFT_OUT_TEXTS[action.kind]
            text = single if len(action.samples) == 1 else several.format(len(action.samples))
            return replace(action, description=text, notes=notes, restored_step=before)
        text = _ACTION_TEXTS[action.kind]
        if action.kind == "fallback":
            for name in action.fallbacks:
                find_fallback(list(self.diagnosis_context.fallbacks), name).disable()
            # Saved in checkpoints: a resumed run keeps them off.
            self.state.switched_off += action.fallbacks
            notes = [f"{name} stays off for this run" for name in action.fallbacks]
            return replace(action, description=text, notes=notes, restored_step=before)
        if action.kind == "rollback":
            target, notes = self._roll_back_to_snapshot(action)
            num_repeated = before - target
            repeated_text = f": {num_repeated} healthy step(s) are repeated" if num_repeated else ""
            description = f"{text} to step {target}{repeated_text}"
            return replace(action, description=description, notes=notes, restored_step=target)
        return replace(action, description=text, restored_step=before)

    def _roll_back_to_snapshot(self, action: Action) -> tuple[int, list[str]]:
        """Roll the run back to a snapshot, with lower learning rates if the action says so.

        Returns the snapshot's step and messages.
        """
        steps, notes = self.snapshots.steps, []
        # With a lower rate, the oldest: newer ones may already be drifting towards this failure.
        target = steps[0] if action.should_lower_lr else steps[-1]
        # AdamW's state may be younger than the snapshot: state without a stored value is reset.
        self.engine.drop_optimizer_state(self.snapshots.restore_snapshot(target))
        if action.should_lower_lr:
            # In addition to earlier rollbacks; the schedule depends only on the step and ignores them.
            self.state.lr_scale *= self.policy.config.rollback_lr
            notes.append(f"learning rates are now {self.state.lr_scale:g} times the recipe's")
        self.files.rewind_logs_and_checkpoints(target, is_new_trajectory=action.should_lower_lr)
        return target, notes

    def _quarantine_samples(self, action: Action, step: int, diagnoses: Sequence[Diagnosis]) -> list[str]:
        # Left out from its use in this step on: earlier epochs did train on it, and their order stays.
        first_position = (step - 1) * self.samples_per_step
        first_uses: dict[str, SampleOccurrence] = {}
        for position in range(first_position, first_position + self.samples_per_step):
            draw = self.order.get_occurrence(position)
            first_uses.setdefault(self.order.ids[draw.sample_index], draw)
        # By sample: the diagnosis that names it.
        causes = {sample: diagnosis for diagnosis in diagnoses for sample in diagnosis.sample_ids}
        records = []
        for sample in action.samples:
            use, diagnosis = first_uses[sample], causes[sample]
            # Empty if no measurement was needed, because the message has the fact.
            evidence = {name: diagnosis.evidence[name] for name in _MEASUREMENTS if name in diagnosis.evidence}
            if evidence:
                evidence |= {"rank": diagnosis.rank, "timesteps": list(diagnosis.timesteps)}
            record = QuarantineRecord(
                sample,
                from_epoch=use.epoch,
                from_copy=use.copy,
                to_epoch=None if action.kind == "quarantine" else use.epoch,
                step=step,
                cause=diagnosis.cause,
                reason=diagnosis.message,
                evidence=evidence,
            )
            records.append(record)
        self.quarantine.add(records)
        # This copy of the order is computed ahead; the loader builds its own again. Later samples move forward, so the
        # repeated step has as many samples as before.
        self.order.reset()
        self.files.save_quarantine(self.quarantine)
        duration = " until it is released" if action.kind == "quarantine" else ""
        notes = [f"{sample} is in {self.quarantine.path.name}{duration}" for sample in action.samples]
        # A sample that is only skipped is read again in the next epoch, and its entry must not change.
        return notes + (self.files.mark_bad_entries(action.samples) if action.kind == "quarantine" else [])

    def make_stop_error(
        self, failure: RunFailure, diagnoses: Sequence[Diagnosis], action: Action, event: Event
    ) -> NonFiniteError:
        samples = [sample for diagnosis in diagnoses for sample in diagnosis.sample_ids]
        notes = [*action.notes, *self.files.mark_bad_entries(samples)]
        # May restore a snapshot; what is saved below is that state.
        good = self._restore_last_good_snapshot(failure, diagnoses)
        state = "do not use the weights" if good is None else f"the weights are those of step {good}"
        kind, advice = format_event_kind(failure.kind), _advise_after_stop(diagnoses)
        try:
            if good is None:
                notes.append(f"nothing was saved at this step: {advice}")
            elif good > 0:  # a run starts from step 0 anyway
                self.files.save_run_checkpoint(good, self.state_dict())
                lost_steps = failure.step - 1 - good
                after = f", without the {lost_steps} after it" if lost_steps else ""
                notes.append(f"step {good} is saved in {checkpoint_path(Path(), good)}{after}: {advice}")
        except DitLoraError as error:
            notes.append(f"{error}")
        summary = f"step {failure.step}: {kind}; {state}"
        message = format_list(summary, self.format_diagnoses(diagnoses))
        return NonFiniteError("\n".join([message, f"stopped: {action.reason}", *notes]), event.to_record())

    def _restore_last_good_snapshot(self, failure: RunFailure, diagnoses: Sequence[Diagnosis]) -> int | None:
        """Find the last step whose state is good, restoring a snapshot if necessary; None if nothing should be saved.

        Nothing should be saved if a checkpoint has that state already, or if it is unknown when the state became bad.
        """
        state_diagnoses = [diagnosis for diagnosis in diagnoses if diagnosis.cause in STATE_CAUSES]
        frozen = bool(state_diagnoses) and all(diagnosis.evidence.get("frozen") for diagnosis in state_diagnoses)
        # The gate left weights and optimizer state as they were before this step.
        if failure.kind not in BAD_STATE_KINDS and (frozen or not state_diagnoses):
            return failure.step - 1
        # Frozen weights are checked only before a save: the first wrong step is unknown.
        if frozen:
            return None
        steps = self._drop_nonfinite_snapshots()
        if not steps or steps[-1] <= self.files.find_newest_saved_step():
            return None
        self.engine.drop_optimizer_state(self.snapshots.restore_snapshot(steps[-1]))
        return steps[-1]


class RecoveryFileUpdater:
    """Changes a run's files for recovery. Called on every rank; only the main process writes, except for bundles."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        journal: Journal | None,
        watcher: StepMonitor,
        guard_start: InitialGuardState,
    ) -> None:
        self.setup = checkpoints.setup
        self.checkpoints = checkpoints
        self.journal = journal
        self.watcher = watcher
        self.guard_start = guard_start
        # Bundles of earlier starts count too.
        self._num_bundles = len(list((self.setup.session.dir / "bundles").glob("step_*")))

    def write_event(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.write_event(event)

    def rewind_logs_and_checkpoints(self, step: int, *, is_new_trajectory: bool) -> None:
        """Drop the log lines of steps after `step`; with `is_new_trajectory`, also the checkpoints of these steps."""
        if self.journal is not None:
            self.checkpoints.writer.wait()  # a checkpoint under way may be one to remove
            with self.checkpoints.writer.record_os_errors():
                self.journal.remove_lines_after(step)
                if is_new_trajectory:
                    remove_checkpoints_after(self.setup.session.dir, step)
            # The losses of later steps are dropped from the log, so other checkpoints may be the best now.
            self.checkpoints.update_best_checkpoint(step)
        # Collective, so not inside the condition: every rank's medians are rolled back with the run.
        share_spike_history(self.watcher, self.journal)

    def save_quarantine(self, quarantine: Quarantine) -> None:
        """Write the quarantine, the list of left-out samples, to the run's folder."""
        if self.setup.session.is_main:
            with self.checkpoints.writer.record_os_errors():
                quarantine.save()

    def save_if_due(self, step: int, guard_state: Mapping[str, Any]) -> None:
        """Save a checkpoint with the guard's state after a skipped step, if one is due."""
        train = self.setup.recipe.train
        # A skipped step has no result, so the code that saves after a step does not run for it.
        if step % train.save_every == 0 or step == train.steps:
            self.save_run_checkpoint(step, guard_state)

    def save_run_checkpoint(self, step: int, guard_state: Mapping[str, Any]) -> None:
        """Checkpoint the present weights with the guard's record; raises if they are not finite."""
        self.checkpoints.save(step, guard_state, wait=True)

    def mark_bad_entries(self, samples: Sequence[str]) -> list[str]:
        """Mark the bad cache entries of these samples. Returns messages, on the main process only."""
        if not self.setup.session.is_main:
            return []
        mark_paths = self.setup.data.training_set.mark_bad_entries(samples)
        return [f"marked the cache entry as bad ({path}): the next start encodes it again" for path in mark_paths]

    def find_newest_saved_step(self) -> int:
        """Step of the newest checkpoint, equal on all ranks; 0 if there is none."""
        step = 0
        if self.setup.session.is_main:
            self.checkpoints.writer.wait()  # one may be under way
            step = max(list_checkpoints(self.setup.session.dir), default=0)
        return broadcast_object(step)

    def write_replay_bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Write a bundle, the inputs of `dit-lora replay`, on the rank that ran the micro-batch.

        Each process writes until its bundles and those that the run's folder had at the start number `guard.bundles`.

        Returns the bundle's path relative to the run's folder, or None. Collective if weights are sharded.
        """
        if not self._reserve_bundle_slot():
            return None
        setup = self.setup
        # Before any rank returns: all of them gather sharded weights.
        weights = setup.engine.trainable_state_dict()
        if setup.engine.collective_forward and not setup.session.is_main:
            # All ranks have the same micro-batch and weights.
            return None
        name = f"step_{micro_batch.step:06d}_rank_{micro_batch.rank}_micro_step_{micro_batch.micro_step}"
        return self._write_bundle_folder(
            name, self._build_bundle_metadata(micro_batch, event), micro_batch.tensors, weights
        )

    def write_gradient_bundle(
        self, micro_batches: Sequence[MicroBatch], gradients: Mapping[str, torch.Tensor], event: Event
    ) -> str | None:
        """Write a bundle of a step with a wrong gradient: the micro-batches of all ranks, and the gradient.

        Returns its path as `write_replay_bundle` does, on the main process only. Collective; see
        `run_or_raise_on_all_ranks`.
        """
        if not self._reserve_bundle_slot():
            return None

        def describe_micro_batches() -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
            # Pickled on their way, which would keep a tensor's device.
            return [
                (_describe_micro_batch(batch), {name: tensor.cpu() for name, tensor in batch.tensors.items()})
                for batch in micro_batches
            ]

        received = [item for items in gather_or_raise("micro-batches", describe_micro_batches) for item in items]
        # All ranks have the same weights, and the main process has all micro-batches.
        if not self.setup.session.is_main:
            return None
        metadata = self._build_bundle_metadata(micro_batches[-1], event)
        metadata["micro_batches"] = [replay for replay, _ in received]
        # Names begin with the number of the micro-batch, in the order of `micro_batches`.
        samples = {
            f"{number}/{name}": tensor
            for number, (_, tensors) in enumerate(received)
            for name, tensor in tensors.items()
        }
        weights = self.setup.engine.trainable_state_dict()
        return self._write_bundle_folder(f"step_{event.step:06d}_gradient", metadata, samples, weights, gradients)

    def _reserve_bundle_slot(self) -> bool:
        """True if another bundle may be written, which is counted; equal on ranks that call this together."""
        if self._num_bundles >= self.setup.recipe.guard.bundles:
            return False
        # Counted even if this rank writes nothing: ranks that call this together must keep equal counts.
        self._num_bundles += 1
        return True

    def _write_bundle_folder(
        self,
        name: str,
        metadata: Mapping[str, Any],
        samples: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> str | None:
        # Bundles of the same name: the step failed before.
        bundles = self.setup.session.dir / "bundles"
        earlier = len(list(bundles.glob(f"{name}*")))
        folder = bundles / (f"{name}_again_{earlier}" if earlier else name)
        try:
            limit = self.setup.recipe.guard.bundle_mib
            write_replay_bundle(folder, metadata, samples, weights, gradients=gradients, limit_mib=limit)
        # A run is worth more than a bundle.
        except OSError as error:
            tqdm.write(make_printable(f"warning: cannot write {folder}: {error.strerror}"), file=sys.stderr)
            return None
        return f"bundles/{folder.name}"

    def _build_bundle_metadata(self, micro_batch: MicroBatch, event: Event) -> dict[str, Any]:
        """Metadata to rerun a micro-batch elsewhere, in addition to its tensors and the weights."""
        setup, recipe = self.setup, self.setup.recipe
        if "class_labels" in micro_batch.tensors:
            # A replay has no data set to read the class names from.
            classes = tuple(find_class_names_in_data(recipe.data, recipe.cache_dir))
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": classes})})
        return {
            "event": event.to_record(),
            "recipe": recipe.model_dump(mode="json"),
            "replay": _describe_micro_batch(micro_batch),
            "switched_off": list(self.guard_start.state.switched_off),
            "start_peak": self.guard_start.start_peak,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype is setup.dtype),
            "transformer_digest": setup.data.transformer_digest,
            "packages": dict(probe_environment().versions),
        }

    def say(self, line: str) -> None:
        self.setup.session.say(line)


def _describe_micro_batch(micro_batch: MicroBatch) -> dict[str, Any]:
    """A micro-batch in bundle.json: with the recipe, all that its forward pass needs in addition to its tensors."""
    return {
        "step": micro_batch.step,
        "micro_step": micro_batch.micro_step,
        "rank": micro_batch.rank,
        "ids": micro_batch.ids,
        # This key keeps the name that it has in existing bundles.
        "draws": micro_batch.sample_seeds,
        "faults": dict(micro_batch.faults),
    }


def _advise_after_stop(diagnoses: Sequence[Diagnosis]) -> str:
    causes = {diagnosis.cause for diagnosis in diagnoses}
    if causes <= {"data", "transient"}:
        return "continue with train.resume=auto"
    if any("weight_decay" in diagnosis.evidence for diagnosis in diagnoses):
        return "start again, or from an earlier checkpoint, with a lower optim.weight_decay"
    if "rank" in causes:
        return "continue with train.resume=auto, without the named device"
    if "learning_rate" in causes:
        return "start again, or from an earlier checkpoint, with a lower learning rate (optim.groups)"
    if causes & {"weights", "optimizer"}:
        return "train.resume=auto continues from the newest complete checkpoint, if there is one"
    return "resuming would repeat the failure; see events.jsonl, and replay the bundle with dit-lora replay"
