"""Handles a failed step: every rank diagnoses it, all agree on an action, and continue or stop."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.loading.order import Draw, Order
from dit_lora.data.loading.quarantine import LeftOut, Quarantine
from dit_lora.errors import DitLoraError, listed
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.episode import (
    OF_STATE,
    OF_WEIGHTS,
    Capabilities,
    Episode,
    Found,
    Resolved,
    verdict_lines,
)
from dit_lora.guard.event import Event, event_of
from dit_lora.guard.gate import NonFiniteError, Trip
from dit_lora.guard.policy import Action, Policy
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.state import bad_state, run_away
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import find_switch
from dit_lora.guard.verdict import Verdict
from dit_lora.training.checkpoints.files import checkpoint_path
from dit_lora.training.guarding.files import RecoveryFiles
from dit_lora.training.guarding.state import GuardState
from dit_lora.training.guarding.swap import tried_elsewhere

_DONE = {
    "retry": "taken again",
    "skip": "taken again without it, this once",
    "quarantine": "quarantined, and taken again without it",
    "fallback": "switched off for this run, and taken again",
    "rollback": "rolled back",
    "stop": "stopped",
}


@dataclass(frozen=True)
class RunTrip:
    """A failed step of a run, with everything needed to diagnose it."""

    trip: Trip
    micro_batches: Sequence[MicroBatch]
    control: MicroBatch | None
    """A micro-batch of the last healthy step; None in the first step."""

    @property
    def step(self) -> int:
        return self.trip.step

    @property
    def kind(self) -> str:
        return self.trip.kind


@dataclass
class RunRecovery(Episode[RunTrip, MicroBatch]):
    """Recovery of one run, with its list of actions. Every rank has an equal one."""

    can: ClassVar[Capabilities] = Capabilities(takes_again=True, leaves_out=True)
    suspects: Suspects
    policy: Policy
    state: GuardState
    quarantine: Quarantine
    order: Order
    snapshots: Snapshots
    drop_state: Callable[[Sequence[str]], None]
    """Removes the optimizer state that a snapshot does not have."""
    samples_per_step: int
    files: RecoveryFiles
    share: Callable[[MicroBatch | None, int], MicroBatch | None] = lambda own, owner: own
    """Gives every rank the micro-batch of rank `owner`; other ranks pass None. Used for collective forwards."""

    def record(self) -> dict[str, Any]:
        """The guard's state for a checkpoint."""
        state = asdict(self.state)
        return {
            "parity": {"passed": state.pop("passed")},
            "state": state,
            "policy": self.policy.state(),
            "start_peak": self.suspects.start_peak,
        }

    def recover(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> int:
        """Handle a failed step; returns the step to continue from. Collective.

        `control` is a micro-batch of the last healthy step. Raises `NonFiniteError` on every rank if no action
        applies.
        """
        resolution = self.resolve(RunTrip(trip, micro_batches, control))
        assert resolution.target is not None  # a run's resolution always has a target
        return resolution.target

    @property
    def lockstep(self) -> bool:
        return self.suspects.lockstep

    def diagnosed(self, trip: RunTrip) -> list[Found[MicroBatch]]:
        # A failed step with a verdict was diagnosed where it was detected: nothing is replayed.
        if trip.trip.verdict is not None:
            return []
        diagnosed = self._diagnose(trip.trip, trip.micro_batches, trip.control)
        # Only other ranks can tell a bad sample from a bad rank.
        diagnosed = tried_elsewhere(diagnosed, self.suspects, trip.kind, self.share)
        return [Found(diagnosis, micro_batch) for micro_batch, diagnosis in diagnosed]

    def agreed(self, trip: RunTrip, found: Sequence[Found[MicroBatch]]) -> list[Verdict]:
        diagnosis = trip.trip.verdict
        return [diagnosis] if diagnosis is not None else super().agreed(trip, found)

    def chosen(self, trip: RunTrip, verdicts: Sequence[Verdict]) -> Action:
        skipped = [v.sample_id for v in self.quarantine.records]
        return self.policy.choose(trip.step, verdicts, skipped)

    def bundle(self, source: MicroBatch, event: Event) -> str | None:
        return self.files.bundle(source, event)

    def write(self, event: Event) -> None:
        self.files.event(event)

    def say(self, words: str) -> None:
        self.files.say(words)

    def _diagnose(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> list[tuple[MicroBatch, Verdict]]:
        if trip.kind in OF_WEIGHTS:
            last_batch = micro_batches[-1]
            # The state is at fault, not a micro-batch; the last one only gives the diagnosis a position.
            diagnosis = bad_state(last_batch, self.suspects) or run_away(last_batch, self.suspects)
            diagnoses = [replace(diagnosis, micro_step=None)]
            if self.suspects.lockstep:
                broadcast_object_list(diagnoses)
            return [(last_batch, diagnoses[0])]
        if self.suspects.lockstep:
            return self._diagnose_together(trip, micro_batches, control)
        # Each rank diagnoses its own micro-batches in parallel. A bad loss names its micro-batches; a bad gradient
        # makes all suspect.
        suspect_batches = [
            micro_batch
            for micro_batch in micro_batches
            if not trip.micro_batches
            or (micro_batch.rank, micro_batch.micro_step) in trip.micro_batches
        ]
        # In the first step, use another micro-batch of the same step.
        if control is None:
            control = next(
                (
                    micro_batch
                    for micro_batch in micro_batches
                    if micro_batch not in suspect_batches
                ),
                None,
            )
        return [
            (micro_batch, diagnose(micro_batch, self.suspects, kind=trip.kind, control=control))
            for micro_batch in suspect_batches
        ]

    def _diagnose_together(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> list[tuple[MicroBatch, Verdict]]:
        """Diagnose each suspect micro-batch on all ranks, one after another.

        The diagnoses are equal on all ranks except for evidence that each rank gathers by itself.
        """
        local_batches = {(batch.rank, batch.micro_step): batch for batch in micro_batches}
        # Sorted: all ranks must take the same micro-batch at the same time.
        positions = trip.micro_batches or sorted(gather_object(list(local_batches)))
        if control is None:
            control = next(
                (
                    candidate
                    for position, candidate in local_batches.items()
                    if position not in positions
                ),
                None,
            )
        diagnosed = []
        for position in positions:
            owner, is_owner = position[0], position in local_batches
            micro_batch = self.share(local_batches.get(position), owner)
            shared_control = self.share(control if is_owner else None, owner)
            if micro_batch is None:
                raise ValueError(f"no rank has the micro-batch {position}")
            try:
                shared_diagnosis = [
                    diagnose(micro_batch, self.suspects, kind=trip.kind, control=shared_control)
                ]
            except torch.OutOfMemoryError as error:
                # It may have left a shared forward midway: no collective is possible any more.
                raise self._stopped_in_a_pass(trip, micro_batch) from error
            # The owner's verdict counts on every rank: the loop must not branch on local evidence.
            broadcast_object_list(shared_diagnosis, from_process=owner)
            diagnosed.append((micro_batch, shared_diagnosis[0]))
            if shared_diagnosis[0].cause in OF_STATE:
                break  # all ranks share the state: it is why the others fail
        return diagnosed

    def _stopped_in_a_pass(self, trip: Trip, one: MicroBatch) -> NonFiniteError:
        """The error for a rank that runs out of memory in a shared forward pass; other ranks may wait in it
        forever.
        """
        rank = PartialState().process_index
        message = (
            f"not found: a replay does not fit into memory beside what the run holds on rank {rank}, and ranks that "
            "share a pass cannot go on alone; continue with train.resume=auto and train.checkpointing=full, a smaller "
            "train.batch_size, or more ranks"
        )
        diagnosis = Verdict("unknown", message, trip.step, rank, one.micro_step, sample_ids=one.ids)
        event = event_of(trip.step, trip.kind, diagnosis, "stop", 0.0)
        self.files.event(event)
        kind = trip.kind.replace("_", " ")
        summary = f"step {trip.step}: {kind}; nothing was saved at this step"
        return NonFiniteError(listed(summary, verdict_lines([diagnosis])), event.record())

    def possible(self, trip: RunTrip, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """The action, or `stop` instead: a rollback needs a finite snapshot, and the run needs a sample."""
        if action.kind in ("skip", "quarantine") and action.samples:
            # A sample that is excluded for an epoch returns after it, so it does not count as lost.
            for_good = {r.sample_id for r in self.quarantine.records if r.to_epoch is None}
            left_out = for_good | set(action.samples)
            if not set(self.order.ids) - left_out:
                return Action("stop", why="no sample is left: every one was at fault")
        if action.kind == "rollback" and not self._finite_snapshots():
            return Action("stop", why="no snapshot that is finite is left")
        return action

    def _finite_snapshots(self) -> list[int]:
        """Steps of the snapshots that are finite on all ranks, ascending; drops the others. Collective."""
        # Bad on any rank counts: all ranks must restore the same step.
        for step in reversed(self.snapshots.steps):
            if gather_object(self.snapshots.not_finite(step)):
                self.snapshots.forget(step)
        return self.snapshots.steps

    def act(self, trip: RunTrip, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        result, before = _DONE[action.kind], trip.step - 1
        if action.kind == "skip" and not action.samples:
            self.files.left_out(trip.step, self.record())
            return Resolved(action, "left out, for no sample is at fault", target=trip.step)
        if action.kind in ("skip", "quarantine"):
            notes = self._leave_out(action, trip.step, verdicts)
            return Resolved(action, result, notes, target=before)
        if action.kind == "fallback":
            for name in action.switches:
                find_switch(list(self.suspects.switches), name).turn_off()
            # Saved in checkpoints: a resumed run keeps them off.
            self.state.switched_off += action.switches
            notes = [f"{name} stays off for this run" for name in action.switches]
            return Resolved(action, result, notes, target=before)
        if action.kind == "rollback":
            target, notes = self._roll_back(action)
            num_repeated = before - target
            repeated_text = (
                f": {num_repeated} healthy step(s) are taken again" if num_repeated else ""
            )
            return Resolved(
                action, f"{result} to step {target}{repeated_text}", notes, target=target
            )
        return Resolved(action, result, target=before)

    def _roll_back(self, action: Action) -> tuple[int, list[str]]:
        """Restore a snapshot; returns its step and messages."""
        steps, notes = self.snapshots.steps, []
        # With a lower rate, the oldest: newer ones may already be drifting towards this failure.
        target = steps[0] if action.lower_lr else steps[-1]
        # AdamW's state may be younger than the snapshot: state without a stored value is reset.
        self.drop_state(self.snapshots.restore(target))
        if action.lower_lr:
            # In addition to earlier rollbacks; the schedule depends only on the step and ignores them.
            self.state.lr_scale *= self.policy.config.rollback_lr
            notes.append(f"learning rates are now {self.state.lr_scale:g} of the recipe's")
        self.files.rewind(target, other_trajectory=action.lower_lr)
        return target, notes

    def _leave_out(self, action: Action, step: int, verdicts: Sequence[Verdict]) -> list[str]:
        # Excluded from its use in this step on: earlier epochs did train on it, and their order stays.
        first_position = (step - 1) * self.samples_per_step
        # The first use of each sample in this step.
        first_uses: dict[str, Draw] = {}
        for position in range(first_position, first_position + self.samples_per_step):
            draw = self.order.draw_at(position)
            first_uses.setdefault(self.order.ids[draw.sample], draw)
        # By sample: the verdict that names it.
        causes = {s: v for v in verdicts for s in v.sample_ids}
        self.quarantine.add(
            LeftOut(
                sample,
                from_epoch=first_uses[sample].epoch,
                from_copy=first_uses[sample].copy,
                to_epoch=None if action.kind == "quarantine" else first_uses[sample].epoch,
                step=step,
                cause=causes[sample].cause,
                reason=causes[sample].words,
                evidence=_evidence(causes[sample]),
            )
            for sample in action.samples
        )
        # The order is computed ahead; without the sample all later ones move forward.
        self.order.forget()
        self.files.quarantined(self.quarantine)
        notes = [f"{sample} is in {self.quarantine.path.name}" for sample in action.samples]
        # A sample that is only skipped is read again in the next epoch, and its entry must not change.
        for_good = action.kind == "quarantine"
        return notes + (self.files.set_aside_bad(action.samples) if for_good else [])

    def stopped(
        self, trip: RunTrip, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        samples = [sample for diagnosis in verdicts for sample in diagnosis.sample_ids]
        notes = [*answered.notes, *self.files.set_aside_bad(samples)]
        # May restore a snapshot; what is saved below is that state.
        good = self._go_to_last_good(trip.trip, verdicts)
        state = "not to be used" if good is None else f"those of step {good}"
        kind, advice = trip.kind.replace("_", " "), _advice(verdicts)
        try:
            if good is None:
                notes.append(f"nothing was saved at this step: {advice}")
            elif good > 0:  # a run starts from step 0 anyway
                self.files.save(good, self.record())
                lost_steps = trip.step - 1 - good
                after = f", without the {lost_steps} after it" if lost_steps else ""
                notes.append(
                    f"step {good} is saved in {checkpoint_path(Path(), good)}{after}: {advice}"
                )
        except DitLoraError as error:
            notes.append(f"{error}")
        message = listed(f"step {trip.step}: {kind}; the weights are {state}", self.lines(verdicts))
        return NonFiniteError(
            "\n".join([message, f"stopped: {answered.action.why}", *notes]), event.record()
        )

    def _go_to_last_good(self, trip: Trip, verdicts: Sequence[Verdict]) -> int | None:
        """Find the last step whose state is good, restoring a snapshot if necessary; None if nothing should be saved.

        Nothing should be saved if a checkpoint has that state, or if it is unknown since when the state is bad.
        """
        state_diagnoses = [diagnosis for diagnosis in verdicts if diagnosis.cause in OF_STATE]
        frozen = bool(state_diagnoses) and all(
            diagnosis.evidence.get("frozen") for diagnosis in state_diagnoses
        )
        # The gate left weights and optimizer state as they were before this step.
        if trip.kind not in OF_WEIGHTS and (frozen or not state_diagnoses):
            return trip.step - 1
        # Frozen weights are checked only before a save: the first wrong step is unknown.
        if frozen:
            return None
        steps = self._finite_snapshots()
        if not steps or steps[-1] <= self.files.newest_saved():
            return None
        self.drop_state(self.snapshots.restore(steps[-1]))
        return steps[-1]


def _evidence(verdict: Verdict) -> dict[str, Any]:
    """The measurements behind the diagnosis of a sample, for the quarantine file."""
    names = ("replays", "control", "control_with_the_same_draws", "losses")
    facts = {name: verdict.evidence[name] for name in names if name in verdict.evidence}
    if not facts:
        # No measurement was needed; the message has the fact.
        return {}
    return {**facts, "rank": verdict.rank, "timesteps": list(verdict.timesteps)}


def _advice(verdicts: Sequence[Verdict]) -> str:
    causes = {diagnosis.cause for diagnosis in verdicts}
    if causes <= {"data", "transient"}:
        return "continue with train.resume=auto"
    if any("weight_decay" in diagnosis.evidence for diagnosis in verdicts):
        return "start afresh, or from an earlier checkpoint, with a lower optim.weight_decay"
    if "rank" in causes:
        return "continue with train.resume=auto, without the device that is named"
    if "learning_rate" in causes:
        return (
            "start afresh, or from an earlier checkpoint, with a lower learning rate (optim.groups)"
        )
    if causes & {"weights", "optimizer"}:
        return "train.resume=auto goes on from the newest whole checkpoint, if there is one"
    return "the same step would come out the same; see events.jsonl, replay the bundle with dit-lora replay"
