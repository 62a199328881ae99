"""Handles a step that tripped: every rank diagnoses, all agree, act, and go on or stop."""

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
    """A trip of a run, with what it takes to diagnose it."""

    trip: Trip
    micro_batches: Sequence[MicroBatch]
    control: MicroBatch | None
    """A micro-batch of the last healthy step."""

    @property
    def step(self) -> int:
        return self.trip.step

    @property
    def kind(self) -> str:
        return self.trip.kind


@dataclass
class RunRecovery(Episode[RunTrip, MicroBatch]):
    """The guard's ladder for one run. Every rank holds an equal one."""

    can: ClassVar[Capabilities] = Capabilities(takes_again=True, leaves_out=True)
    suspects: Suspects
    policy: Policy
    state: GuardState
    quarantine: Quarantine
    order: Order
    snapshots: Snapshots
    drop_state: Callable[[Sequence[str]], None]
    """Remove optimizer state that a snapshot does not have."""
    samples_per_step: int
    files: RecoveryFiles
    share: Callable[[MicroBatch | None, int], MicroBatch | None] = lambda own, owner: own
    """Gives every rank the micro-batch that rank `owner` brings, while others bring None; for lockstep."""

    def record(self) -> dict[str, Any]:
        """Return the guard's state as a checkpoint keeps it."""
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
        """Return the step after which to go on; raise `NonFiniteError` on every rank where no rung fits. Collective.

        `control` is a micro-batch of the last healthy step.
        """
        answered = self.resolve(RunTrip(trip, micro_batches, control))
        assert answered.target is not None  # of a run, each has one
        return answered.target

    @property
    def lockstep(self) -> bool:
        return self.suspects.lockstep

    def diagnosed(self, trip: RunTrip) -> list[Found[MicroBatch]]:
        # A trip that carries a verdict was diagnosed where it was found: nothing is replayed then.
        if trip.trip.verdict is not None:
            return []
        own = self._diagnose(trip.trip, trip.micro_batches, trip.control)
        # Only other ranks can tell a bad sample from a bad rank.
        own = tried_elsewhere(own, self.suspects, trip.kind, self.share)
        return [Found(verdict, one) for one, verdict in own]

    def agreed(self, trip: RunTrip, found: Sequence[Found[MicroBatch]]) -> list[Verdict]:
        known = trip.trip.verdict
        return [known] if known is not None else super().agreed(trip, found)

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
            last = micro_batches[-1]
            # The state is at fault and no micro-batch is; the last one only lends the diagnosis a place.
            verdict = bad_state(last, self.suspects) or run_away(last, self.suspects)
            verdicts = [replace(verdict, micro_step=None)]
            if self.suspects.lockstep:
                broadcast_object_list(verdicts)
            return [(last, verdicts[0])]
        if self.suspects.lockstep:
            return self._diagnose_together(trip, micro_batches, control)
        # Each rank diagnoses its own micro-batches at the same time; only a loss names some, a gradient blames all.
        mine = [
            one
            for one in micro_batches
            if not trip.micro_batches or (one.rank, one.micro_step) in trip.micro_batches
        ]
        if control is None:  # in the first step, another micro-batch of the same step serves
            control = next((one for one in micro_batches if one not in mine), None)
        return [
            (one, diagnose(one, self.suspects, kind=trip.kind, control=control)) for one in mine
        ]

    def _diagnose_together(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> list[tuple[MicroBatch, Verdict]]:
        """Diagnose on all ranks each micro-batch in question, one after another.

        The verdicts are equal on all ranks but for evidence that each rank gathers by itself.
        """
        own = {(one.rank, one.micro_step): one for one in micro_batches}
        # Sorted: all ranks have to take the same micro-batch at the same time.
        places = trip.micro_batches or sorted(gather_object(list(own)))
        if control is None:
            control = next((one for place, one in own.items() if place not in places), None)
        diagnosed = []
        for place in places:
            owner, mine = place[0], place in own
            one = self.share(own.get(place), owner)
            other = self.share(control if mine else None, owner)
            if one is None:
                raise ValueError(f"no rank has the micro-batch {place}")
            try:
                verdict = [diagnose(one, self.suspects, kind=trip.kind, control=other)]
            except torch.OutOfMemoryError as error:
                # It may have left a shared pass midway: nobody can be asked to agree any more.
                raise self._stopped_in_a_pass(trip, one) from error
            # The owner's verdict counts on every rank: the loop must not branch on evidence that differs.
            broadcast_object_list(verdict, from_process=owner)
            diagnosed.append((one, verdict[0]))
            if verdict[0].cause in OF_STATE:
                break  # all ranks share it: it is why the others fail
        return diagnosed

    def _stopped_in_a_pass(self, trip: Trip, one: MicroBatch) -> NonFiniteError:
        """Return the error for a rank that leaves a shared pass for want of memory; others may wait in it for ever."""
        rank = PartialState().process_index
        words = (
            f"not found: a replay does not fit into memory beside what the run holds on rank {rank}, and ranks that "
            "share a pass cannot go on alone; continue with train.resume=auto and train.checkpointing=full, a smaller "
            "train.batch_size, or more ranks"
        )
        verdict = Verdict("unknown", words, trip.step, rank, one.micro_step, sample_ids=one.ids)
        event = event_of(trip.step, trip.kind, verdict, "stop", 0.0)
        self.files.event(event)
        kind = trip.kind.replace("_", " ")
        summary = f"step {trip.step}: {kind}; nothing was saved at this step"
        return NonFiniteError(listed(summary, verdict_lines([verdict])), event.record())

    def possible(self, trip: RunTrip, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """Return the action, or `stop` instead: a rollback needs a finite snapshot, and the run a sample."""
        if action.kind in ("skip", "quarantine") and action.samples:
            # A sample that is out up to an epoch comes back after it, and does not empty the data set.
            for_good = {r.sample_id for r in self.quarantine.records if r.to_epoch is None}
            left_out = for_good | set(action.samples)
            if not set(self.order.ids) - left_out:
                return Action("stop", why="no sample is left: every one was at fault")
        if action.kind == "rollback" and not self._finite_snapshots():
            return Action("stop", why="no snapshot that is finite is left")
        return action

    def _finite_snapshots(self) -> list[int]:
        """Return the steps that can be gone back to, ascending, after forgetting those bad on any rank. Collective."""
        # On any rank: what one cannot restore, none may.
        for held in reversed(self.snapshots.steps):
            if gather_object(self.snapshots.not_finite(held)):
                self.snapshots.forget(held)
        return self.snapshots.steps

    def act(self, trip: RunTrip, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        done, before = _DONE[action.kind], trip.step - 1
        if action.kind == "skip" and not action.samples:
            self.files.left_out(trip.step, self.record())
            return Resolved(action, "left out, for no sample is at fault", target=trip.step)
        if action.kind in ("skip", "quarantine"):
            notes = self._leave_out(action, trip.step, verdicts)
            return Resolved(action, done, notes, target=before)
        if action.kind == "fallback":
            for name in action.switches:
                find_switch(list(self.suspects.switches), name).turn_off()
            self.state.switched_off += action.switches
            notes = [f"{name} stays off for this run" for name in action.switches]
            return Resolved(action, done, notes, target=before)
        if action.kind == "rollback":
            target, notes = self._roll_back(action)
            again = before - target
            taken = f": {again} healthy step(s) are taken again" if again else ""
            return Resolved(action, f"{done} to step {target}{taken}", notes, target=target)
        return Resolved(action, done, target=before)

    def _roll_back(self, action: Action) -> tuple[int, list[str]]:
        """Go back to a snapshot, and return its step and what there is to say."""
        steps, notes = self.snapshots.steps, []
        # With a lower rate the oldest: newer ones may be on the way to this step's end already.
        target = steps[0] if action.lower_lr else steps[-1]
        # AdamW's state may be younger than the snapshot: what it has no value for starts anew.
        self.drop_state(self.snapshots.restore(target))
        if action.lower_lr:
            # On top of earlier rollbacks; the schedule is a function of the step and knows nothing of them.
            self.state.lr_scale *= self.policy.config.rollback_lr
            notes.append(f"learning rates are now {self.state.lr_scale:g} of the recipe's")
        self.files.rewind(target, other_trajectory=action.lower_lr)
        return target, notes

    def _leave_out(self, action: Action, step: int, verdicts: Sequence[Verdict]) -> list[str]:
        # Out from its reading in this step on: earlier epochs did train on it, and their order stays.
        first = (step - 1) * self.samples_per_step
        draws: dict[str, Draw] = {}  # the first of each sample
        for position in range(first, first + self.samples_per_step):
            draw = self.order.draw_at(position)
            draws.setdefault(self.order.ids[draw.sample], draw)
        causes = {s: v for v in verdicts for s in v.sample_ids}
        self.quarantine.add(
            LeftOut(
                sample,
                from_epoch=draws[sample].epoch,
                from_copy=draws[sample].copy,
                to_epoch=None if action.kind == "quarantine" else draws[sample].epoch,
                step=step,
                cause=causes[sample].cause,
                reason=causes[sample].words,
                evidence=_evidence(causes[sample]),
            )
            for sample in action.samples
        )
        # The order is computed ahead; without the sample all later ones move up.
        self.order.forget()
        self.files.quarantined(self.quarantine)
        notes = [f"{sample} is in {self.quarantine.path.name}" for sample in action.samples]
        # Skipped only, a sample is read again in the next epoch, and must say the same of itself.
        for_good = action.kind == "quarantine"
        return notes + (self.files.set_aside_bad(action.samples) if for_good else [])

    def stopped(
        self, trip: RunTrip, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        samples = [sample for verdict in verdicts for sample in verdict.sample_ids]
        notes = [*answered.notes, *self.files.set_aside_bad(samples)]
        good = self._go_to_last_good(trip.trip, verdicts)
        state = "not to be used" if good is None else f"those of step {good}"
        kind, advice = trip.kind.replace("_", " "), _advice(verdicts)
        try:
            if good is None:
                notes.append(f"nothing was saved at this step: {advice}")
            elif good > 0:  # step 0 is what the run starts from anyway
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
        """Return the last step whose state is known to be good, after restoring it if need be, or None.

        There is none to save where a checkpoint has it already, or where nobody knows since when the state is bad.
        """
        of_state = [one for one in verdicts if one.cause in OF_STATE]
        frozen = bool(of_state) and all(one.evidence.get("frozen") for one in of_state)
        if trip.kind not in OF_WEIGHTS and (frozen or not of_state):
            return trip.step - 1
        if frozen:  # noticed only at a save: since when the steps went wrong is not known
            return None
        steps = self._finite_snapshots()
        if not steps or steps[-1] <= self.files.newest_saved():
            return None
        self.drop_state(self.snapshots.restore(steps[-1]))
        return steps[-1]


def _evidence(verdict: Verdict) -> dict[str, Any]:
    """Return the measurements behind a verdict on a sample, for the list of samples left out."""
    names = ("replays", "control", "control_with_the_same_draws", "losses")
    facts = {name: verdict.evidence[name] for name in names if name in verdict.evidence}
    if not facts:
        return {}  # a fact was enough, and the words have it
    return {**facts, "rank": verdict.rank, "timesteps": list(verdict.timesteps)}


def _advice(verdicts: Sequence[Verdict]) -> str:
    causes = {verdict.cause for verdict in verdicts}
    if causes <= {"data", "transient"}:
        return "continue with train.resume=auto"
    if any("weight_decay" in verdict.evidence for verdict in verdicts):
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
