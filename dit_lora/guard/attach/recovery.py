"""Act on a failed step of somebody else's loop, and say and write what was done.

By default nothing ends the loop: a failed step is skipped, bad weights are put back from the snapshot, and where
nothing can be put back the loop runs as it would without a guard. It is ended only if `on_nonfinite` has a `stop`.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.bundles import Bundles
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.diagnosis import CallDiagnosis, no_call, state_verdict
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches, is_row_of_micro_batch
from dit_lora.guard.attach.save_weights import save_trained
from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
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
from dit_lora.guard.gate import NonFiniteError
from dit_lora.guard.policy import Action, Policy
from dit_lora.guard.switches import find_switch
from dit_lora.guard.verdict import Verdict

_LOG = logging.getLogger("dit_lora")
WEIGHTS = "non_finite_weights"
OF_FROZEN = "altered_frozen"
_FROZEN_HINT = (
    "what was trained since the last save may have met the damage; if the loop itself writes there, give checks= "
    "without frozen"
)
_COPIES_HINT = "; what the loop has copied from them since, in files too, may have the bad values"
_OF_SAMPLES = ("data", "labels", "inputs")
_NOT_OF_THE_LOSS = ("kernel", "attention_backend", "rank", *OF_STATE)
_MAX_DIAGNOSED = 10
"""Failed steps in a row that are diagnosed by experiments; after them only facts are looked at."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class StepFailure:
    """A step that is not taken, or weights that are to be put back."""

    step: int
    kind: str
    calls: Sequence[CapturedCall] = ()
    gradients: Sequence[str] = ()
    """Parameters whose gradient was bad, where that is known."""
    controls: Mapping[int, CapturedCall] = field(default_factory=dict)
    """The last call of each model, by its id, that was healthy."""
    weights_are_bad: bool = False
    """True if a trained weight is not finite."""
    between_steps: bool = False
    """True if state was found bad at a save: no step is lost."""
    required: bool = False
    """True if the loop asked for good state: then what cannot be put back raises."""
    raised_by_torch: bool = False
    """True if torch itself raises an error for this step right after."""

    def has_bad_weights(self, verdicts: Sequence[Verdict]) -> bool:
        """True if what is trained is not as a step left it, so that skipping this one is not enough."""
        if self.kind in OF_WEIGHTS or self.weights_are_bad:
            return True
        return any(map(_is_about_trained_state, verdicts))


@dataclass(frozen=True)
class Recovered:
    """The decision about a failed step."""

    is_skipped: bool
    """False where nothing could be put back and the loop goes on as without a guard."""
    went_back: bool
    """True if weights were put back."""


@dataclass
class PluginRecovery(Episode[StepFailure, CapturedCall]):
    """Names the cause of a failed step and acts, on all ranks alike."""

    can: ClassVar[Capabilities] = Capabilities(takes_again=False, leaves_out=False)

    host: Host
    state: LoopState
    config: LadderConfig
    folder: Path | None
    watched: WatchedModels
    namer: SampleNamer
    note: Callable[[], None]
    """Called when an event was written and acted on."""
    guard_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    budget: SkipBudget = field(default_factory=SkipBudget)
    has_given_up: bool = False
    """True once trained weights are bad and nothing is held to put back."""

    def __post_init__(self) -> None:
        self._policy = Policy(self.config)
        self._bundles = Bundles(self.host, self.config, self.folder)
        self._known = False
        """True if all that is wrong in the step under way is samples that are known to be bad."""
        self._is_apart = False
        self._may_stop = "stop" in self.config.on_nonfinite
        self._restored: list[str] = []
        """Buffers that were put back before the step under way was diagnosed."""
        self._zero_in_a_row = 0
        self._num_said = 0
        self._has_said_scale = False

    def recover(self, failure: StepFailure) -> Recovered:
        """Act on a failed step. Raises `NonFiniteError` on every rank where the ladder has a stop and nothing fits."""
        self._is_apart = self.host.is_apart
        with self.host.ranks_that_agree():
            answered = self.resolve(failure)
        self.note()
        return Recovered(not self.has_given_up, answered.target is not None)

    @property
    def lockstep(self) -> bool:
        return self.watched.lockstep

    def diagnosed(self, trip: StepFailure) -> list[Found[CapturedCall]]:
        found = self._diagnose(trip)
        if self._is_apart:
            found = [replace(one, verdict=_of_this_process(one.verdict)) for one in found]
        return [replace(one, verdict=_with_gradients(one.verdict, trip.gradients)) for one in found]

    def agreed(self, trip: StepFailure, found: Sequence[Found[CapturedCall]]) -> list[Verdict]:
        return super().agreed(trip, found) or [no_call(trip.step, self.host.rank)]

    def chosen(self, trip: StepFailure, verdicts: Sequence[Verdict]) -> Action:
        self._known = not trip.has_bad_weights(verdicts) and self.budget.knows(verdicts)
        # Before what is known: while every step is lost, to whatever, nothing is trained.
        if self._may_stop and self.budget.is_stuck(self.config.max_skips):
            return Action("stop", why=f"none of the last {self.budget.in_a_row} steps was taken")
        if self._known or trip.raised_by_torch:
            return Action("skip")
        self._policy.skips = self.budget.spent(trip.step)
        if self._may_pass(trip, verdicts):
            return Action("skip")
        skipped = [sample for event in self.events for sample in event["sample_ids"]]
        action = self._policy.choose(trip.step, verdicts, skipped)
        if action.kind == "stop" and not self._may_stop and not trip.required:
            return Action("skip", why=action.why)
        return action

    def possible(self, trip: StepFailure, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """The action, or another where it needs a snapshot and none that is finite is held. Collective."""
        needs_snapshot = action.kind == "rollback" or (
            trip.has_bad_weights(verdicts) and action.kind != "stop"
        )
        if not needs_snapshot or self.state.newest(self.host.gathered) is not None:
            return action
        off = "" if self.state.every else ", for guard.snapshot_every is 0"
        why = f"no snapshot that is finite is held{off}"
        return Action("stop" if self._may_stop or trip.required else "skip", why=why)

    def bundle(self, source: CapturedCall, event: Event) -> str | None:
        if self._known:  # what is known has one
            return None
        # What is switched off before this event's own answer.
        facts = {
            "switched_off": sorted(self.watched.switched_off),
            "start_peak": self.watched.suspects[id(source.owner)].start_peak,
        }
        return self._bundles.write(source, event.record(), facts, all_of=self.lockstep)

    def act(self, trip: StepFailure, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        if trip.kind == OF_FROZEN and action.kind != "stop":
            return Resolved(Action("report"), _FROZEN_HINT, facts={"guard": self.guard_id})
        if action.kind == "skip" and not trip.between_steps:
            self.budget.skip(trip.step, verdicts)
        elif not trip.between_steps:
            self.budget.lose(trip.step, verdicts)
        # Before a stop too: what a run leaves behind must be good.
        is_spoiled = trip.has_bad_weights(verdicts)
        put_back = self._put_back() if is_spoiled or action.kind == "rollback" else None
        if put_back is None and action.kind == "rollback":
            why = "the snapshot that is held does not fit any more"
            action = Action("stop" if self._may_stop or trip.required else "skip", why=why)
        buffers = [*self._restored, *self.state.restore_bad_buffers()]
        self._restored = []
        facts: dict[str, Any] = {"guard": self.guard_id} | ({"known": True} if self._known else {})
        facts |= {"weights_of_step": put_back} if put_back is not None else {}
        if is_spoiled and put_back is None and action.kind != "stop":
            self.has_given_up = True
            done = f"{action.why}: nothing can be put back, and the loop goes on as it would without a guard"
            return Resolved(replace(action, kind="report"), done, facts=facts)
        undone = self._undone(trip, put_back)
        if trip.between_steps and undone:
            undone += _COPIES_HINT
        done = undone if action.kind == "stop" else self._done(trip, action, undone)
        if buffers:
            done += f"; not finite and put back: {', '.join(buffers[:5])}"
        return Resolved(action, done, facts=facts, target=put_back, is_news=self._is_news())

    def write(self, event: Event) -> None:
        self.events.append(event.record())
        if self.folder is None or self.host.rank != 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / "events.jsonl", json.dumps(self.events[-1]))
        except OSError as error:
            self.say(f"guard: cannot write {self.folder}/events.jsonl: {error.strerror}")
            self.folder = None

    def stopped(
        self, trip: StepFailure, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        state = "the weights are not to be used"
        if answered.target is not None or not trip.has_bad_weights(verdicts):
            state = self._left_behind(trip, answered.target, answered.done)
        if trip.kind == OF_FROZEN:
            state += f"; {_FROZEN_HINT}"
        self.note()
        head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}"
        message = f"{head}; {state}; stopped: {answered.action.why}"
        return NonFiniteError(listed(message, self.lines(verdicts)), event.record())

    def say(self, words: str) -> None:
        self.host.say(words)

    def lines(self, verdicts: Sequence[Verdict]) -> list[str]:
        shown = [v.with_sample_ids(tuple(map(self._shown_name, v.sample_ids))) for v in verdicts]
        return verdict_lines(shown, alone=self.host.ranks == 1)

    # Reports on steps that are taken

    def report_save(self, step: int, path: str, bad: str) -> None:
        """Say that what the loop is about to save has values that are not finite."""
        words = f"{path or 'a file'} is saved with values that are not finite: {bad}"
        self._report(step, "non_finite_save", words)

    def report_zero_gradient(self, step: int) -> None:
        """Say that no trained weight got a gradient though the loss asks for one; the step is taken."""
        self._zero_in_a_row += 1
        count = self._zero_in_a_row
        if self._may_stop and count > self.config.max_skips:
            words = f"no gradient reached a trained weight in {count} steps in a row, though the loss asks for one"
            event = self._report(step, "zero_gradient", words, action="stop")
            hint = "checks= without zero_gradient goes on"
            raise NonFiniteError(f"guard: step {step}: {words} ({hint})", event.record())
        if count in (1, 10, 100, 1000):
            in_a_row = f" in {count} steps in a row" if count > 1 else ""
            words = f"no gradient reached a trained weight{in_a_row}, though the loss asks for one"
            self._report(step, "zero_gradient", words)

    def gradient_arrived(self) -> None:
        self._zero_in_a_row = 0

    def report_loss_scale(self, step: int, scale: float) -> None:
        """Say that a gradient scaler has halved itself away. Raises `NonFiniteError` where the ladder has a stop."""
        words = f"gradients overflow fp16 at every loss scale down to {scale:g}; use bf16, or a lower learning rate"
        if self._may_stop:
            event = self._report(step, "loss_scale", words, action="stop")
            raise NonFiniteError(f"step {step}: {words}", event.record())
        if not self._has_said_scale:
            self._has_said_scale = True
            self._report(step, "loss_scale", words)

    def report_loss(self, failure: StepFailure) -> None:
        """Say why a loss is not finite though every gradient is; the step is taken."""
        found = [entry.verdict for entry in self._diagnose(failure)]
        verdicts = found or [no_call(failure.step, self.host.rank)]
        for verdict in verdicts:
            event = event_of(failure.step, failure.kind, verdict, "report", 0.0)
            self.write(replace(event, facts={"guard": self.guard_id}))
        head = f"guard: step {failure.step}: the loss is not finite, but every gradient is; the step was taken"
        self.say(listed(head, self.lines(verdicts)))

    def put_back_alone(self, step: int) -> None:
        """Put the newest good snapshot back on this rank, which is about to save bad weights. Not collective.

        Where the others are as bad, they find it at their next step and go back to the same.
        """
        verdict = state_verdict(self.watched, WEIGHTS, step, self.host.rank)
        put_back = self._put_back(list)
        if put_back is None or verdict is None:
            return  # what is saved is looked at in any case
        event = event_of(step, WEIGHTS, verdict, "rollback", 0.0)
        self.write(replace(event, facts={"guard": self.guard_id, "weights_of_step": put_back}))
        head = f"guard: rank {self.host.rank} was about to save weights that are not finite: {verdict.words}"
        _LOG.warning("%s; those of step %d are saved", head, put_back)

    def _report(self, step: int, kind: str, words: str, *, action: str = "report") -> Event:
        event = Event(
            step,
            kind,
            {"cause": "unknown", "words": words},
            action,
            rank=self.host.rank,
            facts={"guard": self.guard_id},
        )
        self.write(event)
        if action != "stop":
            self.say(f"guard: step {step}: {words}")
        return event

    def _diagnose(self, failure: StepFailure) -> list[Found[CapturedCall]]:
        step, rank = failure.step, self.host.rank
        # State first: with bad weights every call fails, and samples would be blamed for it.
        state = state_verdict(self.watched, failure.kind, step, rank)
        if state is not None and not self._is_written_by_loop(state):
            # A loop that writes to weights itself may have spoiled them with a bad sample of this very step.
            inputs = self._from_inputs(failure) if _are_spoiled_as_a_whole(state) else []
            return inputs or [Found(state)]
        if failure.kind in (*OF_WEIGHTS, OF_FROZEN):
            return [Found(state)] if state is not None else []  # none: it is another rank's
        # What a failed forward has left in a buffer would make every replay fail.
        self._restored = self.state.restore_bad_buffers()
        calls: Sequence[CapturedCall] = failure.calls
        if self.lockstep:
            calls = [self.namer.with_proven_names(call) for call in calls]
        diagnosis = CallDiagnosis(
            self.watched,
            # Ranks that diagnose together must come to the same names: those that the calls carry.
            SampleNamer(LoadedBatches()) if self.lockstep else self.namer,
            failure.kind,
            step,
            is_raised=failure.raised_by_torch,
            has_experiments=self.budget.in_a_row < _MAX_DIAGNOSED,
        )
        found = [
            entry
            for of_rank in self.watched.shared(calls, failure.controls)
            for entry in diagnosis.verdicts(of_rank)
        ]
        if state is None:
            return found or [Found(no_call(step, rank))]
        # A bad sample leaves its NaN in a buffer that the model writes to; it is the buffer where no sample is bad.
        of_samples = [entry for entry in found if entry.verdict.cause in _OF_SAMPLES]
        return of_samples or [Found(_as_written_buffer(state))]

    def _from_inputs(self, failure: StepFailure) -> list[Found[CapturedCall]]:
        """Samples that are bad as the first models of this step were given them."""
        if self.lockstep:
            return []
        diagnosis = CallDiagnosis(self.watched, self.namer, failure.kind, failure.step)
        return diagnosis.bad_samples(failure.calls, failure.controls, self.host.rank)

    def _is_written_by_loop(self, verdict: Verdict) -> bool:
        """True if all that is wrong are values that the model or the loop itself writes."""
        record, wrong = self.watched.record, verdict.evidence.get("frozen", [])
        return record is not None and bool(wrong) and all(map(record.is_own, wrong))

    def _may_pass(self, trip: StepFailure, verdicts: Sequence[Verdict]) -> bool:
        """True if the next step may be healthy.

        Where no sample is named, or every one fails, no replay tells this step from all of them, and a loop in fp16
        expects to lose some to its range.
        """
        is_general = all(
            verdict.evidence.get("every_sample")
            or verdict.evidence.get("of_the_loop")
            or verdict.cause == "precision"
            or (verdict.cause in ("inputs", "unknown") and not verdict.sample_ids)
            for verdict in verdicts
        )
        allowed = "skip" in self.config.on_nonfinite and self._policy.skips < self.config.max_skips
        return is_general and allowed and not trip.has_bad_weights(verdicts)

    def _is_news(self) -> bool:
        """False for a sample that is known to be bad, and for most of many failures."""
        if self._known:
            return False
        self._num_said += 1
        count = self._num_said
        return count <= _MAX_SHOWN or count & (count - 1) == 0

    def _shown_name(self, name: str) -> str:
        is_unknown = is_row_of_micro_batch(name) and self.namer.batches.has_batches
        return f"{name} (its dataset index is not known)" if is_unknown else name

    def _put_back(self, gathered: Callable[[Sequence[str]], list[str]] | None = None) -> int | None:
        """Put the newest good snapshot back and return its step; None if there is none that fits.

        Collective, unless `gathered` asks this rank alone.
        """
        step = self.state.newest(gathered or self.host.gathered)
        if step is None:
            return None
        try:
            self.state.restore(step)
        except DitLoraError as problem:  # tensors have another shape or dtype now
            self.host.say(f"guard: {problem}")
            return None
        return step

    def _undone(self, trip: StepFailure, put_back: int | None) -> str:
        """Say in a sentence what a snapshot that was put back costs."""
        if put_back is None:
            return ""
        lost = trip.step - 1 - put_back
        every = f"; a snapshot is taken every {self.state.every} steps" if lost else ""
        undone = "1 step is undone" if lost == 1 else f"{lost} steps are undone"
        return f"weights and optimizer are those of step {put_back}, {undone}{every}"

    def _done(self, trip: StepFailure, action: Action, undone: str) -> str:
        if action.kind == "fallback":
            switches = [
                switch for each in self.watched.suspects.values() for switch in each.switches
            ]
            for name in action.switches:
                find_switch(switches, name).turn_off()
                self.watched.switched_off.add(name)
            off = f"{', '.join(action.switches)} switched off for this run"
            return f"{off}; {undone or 'the step was not taken'}"
        if action.kind == "rollback" and action.lower_lr:
            self.state.lower_rates(self.config.rollback_lr)
            return f"{undone}; learning rates are multiplied by {self.config.rollback_lr:g}"
        if trip.raised_by_torch:
            return "torch raises an error for it"
        return undone or "the step was not taken"

    def _left_behind(self, trip: StepFailure, put_back: int | None, undone: str) -> str:
        """Say what the weights are after a stop; good ones are written to the disk."""
        step = trip.step - 1 if put_back is None else put_back
        state = undone or "the weights are those of the step before"
        if self.host.under_deepspeed:  # its engine holds them
            return state
        folder = self.folder if self.folder is not None else self.host.folder
        weights = {name: p.detach() for name, p in self.state.parameters.items()}
        where = save_trained(weights, folder, step, is_main=self.host.rank == 0)
        return f"{state}; {where}" if where else state


def _is_about_trained_state(verdict: Verdict) -> bool:
    if verdict.evidence.get("frozen"):
        return False
    return verdict.cause in OF_STATE or "not_finite" in verdict.evidence


def _are_spoiled_as_a_whole(verdict: Verdict) -> bool:
    """True if several trained weights have nothing but NaN, as after an update with a NaN gradient."""
    described = [
        re.search(r"has (\d+) NaN among (\d+)", line)
        for line in verdict.evidence.get("not_finite", ())
    ]
    whole = [match for match in described if match is not None and match[1] == match[2]]
    return verdict.cause == "weights" and len(whole) > 1


def _as_written_buffer(verdict: Verdict) -> Verdict:
    """The verdict on a buffer that the model itself writes to: it is not damaged, but holds what a call has left."""
    words = verdict.words.replace(
        "; the checkpoint or memory is damaged", "; the model itself writes to it"
    )
    return replace(verdict, cause="unknown", words=words, evidence={})


def _with_gradients(verdict: Verdict, names: Sequence[str]) -> Verdict:
    """The verdict with the parameters whose gradient was bad, where no replay has found the place."""
    if not names or verdict.cause in (*_NOT_OF_THE_LOSS, *_OF_SAMPLES):
        return verdict
    verdict = replace(verdict, evidence={**verdict.evidence, "gradients": list(names[:20])})
    if verdict.module is not None:
        return verdict
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    words = f"{verdict.words}; the gradient of {names[0]}{more} was not finite"
    return replace(verdict, words=words, module=names[0].rpartition(".")[0])


def _of_this_process(verdict: Verdict) -> Verdict:
    """Return a verdict that holds though other processes may have added to the gradients."""
    if verdict.cause != "transient":
        return verdict
    words = (
        "this process's own calls are finite when they are run again; where processes add up their gradients, another "
        "one has the cause"
    )
    return replace(verdict, cause="unknown", words=words)
