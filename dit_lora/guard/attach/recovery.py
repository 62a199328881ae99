"""Act on a tripped step of a loop that is not ours, and say and write what was done."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.bundles import Bundles
from dit_lora.guard.attach.call_recorder import CapturedCall
from dit_lora.guard.attach.diagnosis import (
    call_verdicts,
    of_the_loops_loss,
    state_verdict,
    unseen,
)
from dit_lora.guard.attach.save_weights import save_trained
from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import Watched
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
_SINCE_THE_LAST_SAVE = (
    "what was trained since the last save may have met the damage; if the loop itself writes there, give checks= "
    "without frozen"
)
_OF_SAMPLES = ("data", "labels", "inputs")
_NOT_OF_THE_LOSS = ("kernel", "attention_backend", "rank", *OF_STATE)


@dataclass(frozen=True)
class PluginTrip:
    """A step that is not taken."""

    step: int
    kind: str
    calls: Sequence[CapturedCall] = ()
    gradients: Sequence[str] = ()
    """Parameters whose gradient was not finite, where that is known."""
    controls: Mapping[int, CapturedCall] = field(default_factory=dict)
    """The last call of each model, by its id, that was healthy."""
    moved: bool = False
    """True if the optimizer had changed weights by then."""
    own_loss_is_bad: bool = False
    """True if a loss of this rank, as far as it is known, is not finite."""
    between_steps: bool = False
    """True if what is held was found wrong at a save: no step is lost."""

    def spoiled(self, verdicts: Sequence[Verdict]) -> bool:
        """Return True if what is trained is not as a step left it, so that leaving this one out is not enough."""
        return self.kind in OF_WEIGHTS or self.moved or any(map(_of_what_is_trained, verdicts))


@dataclass
class PluginRecovery(Episode[PluginTrip, CapturedCall]):
    """Names the cause of a trip and acts, on all ranks alike. Which samples come next is the loop's own affair."""

    can: ClassVar[Capabilities] = Capabilities(takes_again=False, leaves_out=False)

    host: Host
    state: LoopState
    config: LadderConfig
    folder: Path | None
    watched: Watched
    note: Callable[[], None]
    """Called when an event was written and acted on."""
    guard_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    budget: SkipBudget = field(default_factory=SkipBudget)

    def __post_init__(self) -> None:
        self._policy = Policy(self.config)
        self._bundles = Bundles(self.host, self.config, self.folder)
        self._known = False
        """True if all that is wrong in the step under way is samples that are known to be bad."""

    def recover(self, trip: PluginTrip) -> bool:
        """Act, and return whether weights were put back; raises `NonFiniteError` on every rank if nothing fits."""
        answered = self.resolve(trip)
        self.note()
        return answered.target is not None

    @property
    def lockstep(self) -> bool:
        return self.watched.lockstep

    def diagnosed(self, trip: PluginTrip) -> list[Found[CapturedCall]]:
        return [
            replace(one, verdict=_with_gradients(one.verdict, trip.gradients))
            for one in self._found_here(trip)
        ]

    def agreed(self, trip: PluginTrip, found: Sequence[Found[CapturedCall]]) -> list[Verdict]:
        return super().agreed(trip, found) or [unseen(trip.step, self.host.rank)]

    def chosen(self, trip: PluginTrip, verdicts: Sequence[Verdict]) -> Action:
        self._known = not trip.spoiled(verdicts) and self.budget.knows(verdicts)
        of_the_loss = not any(verdict.cause in _NOT_OF_THE_LOSS for verdict in verdicts)
        if trip.kind == "zero_gradient" and of_the_loss:
            return self._for_no_gradient()
        # Before what is known: while every step is lost, to whatever, nothing is trained.
        if self.budget.barren(self.config.max_skips):
            return Action("stop", why=f"none of the last {self.budget.in_a_row} steps was taken")
        if self._known:
            return Action("skip")
        self._policy.skips = self.budget.spent(trip.step)
        if self._may_pass(trip, verdicts):
            return Action("skip")
        skipped = [sample for event in self.events for sample in event["sample_ids"]]
        return self._policy.choose(trip.step, verdicts, skipped)

    def possible(self, trip: PluginTrip, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """Return the action, or a stop where it needs a snapshot and none is held that is good."""
        spoiled = trip.spoiled(verdicts) and action.kind != "stop"
        if (spoiled or action.kind == "rollback") and self.state.newest(self.host.gathered) is None:
            off = "" if self.state.every else ", for guard.snapshot_every is 0"
            return Action("stop", why=f"no snapshot that is finite is held{off}")
        return action

    def bundle(self, source: CapturedCall, event: Event) -> str | None:
        if self._known:  # what is known has one
            return None
        # What is switched off before this event's own answer.
        facts = {
            "switched_off": sorted(self.watched.switched_off),
            "start_peak": self.watched.suspects[id(source.owner)].start_peak,
        }
        return self._bundles.write(source, event.record(), facts, all_of=self.lockstep)

    def act(self, trip: PluginTrip, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        if action.kind == "skip":
            self.budget.skip(trip.kind, trip.step, verdicts)
        elif not trip.between_steps:
            self.budget.lose()
        # Before a stop too: what a run leaves behind must be good.
        spoiled = trip.spoiled(verdicts)
        put_back = self._put_back() if spoiled or action.kind == "rollback" else None
        if put_back is None and action.kind == "rollback":
            action = Action("stop", why="the snapshot that is held does not fit any more")
        facts: dict[str, Any] = {"guard": self.guard_id} | ({"known": True} if self._known else {})
        facts |= {"weights_of_step": put_back} if put_back is not None else {}
        undone = self._undone(trip, put_back)
        done = undone if action.kind == "stop" else self._done(action, undone)
        # A sample that is known to be bad, or one more step without a gradient, is no news.
        again = trip.kind == "zero_gradient" and self.budget.in_a_row > 1
        return Resolved(
            action, done, facts=facts, target=put_back, is_news=not self._known and not again
        )

    def write(self, event: Event) -> None:
        self.events.append(event.record())
        if self.folder is not None and self.host.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / "events.jsonl", json.dumps(self.events[-1]))

    def stopped(
        self, trip: PluginTrip, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        state = "the weights are not to be used"
        if answered.target is not None or not trip.spoiled(verdicts):
            state = self._left_behind(trip, answered.target, answered.done)
        if trip.kind == OF_FROZEN:
            state += f"; {_SINCE_THE_LAST_SAVE}"
        self.note()
        head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}"
        message = f"{head}; {state}; stopped: {answered.action.why}"
        return NonFiniteError(listed(message, self.lines(verdicts)), event.record())

    def say(self, words: str) -> None:
        if self.host.rank == 0:
            _LOG.warning("%s", words)

    def lines(self, verdicts: Sequence[Verdict]) -> list[str]:
        return verdict_lines(verdicts, alone=self.host.ranks == 1)

    def _found_here(self, trip: PluginTrip) -> list[Found[CapturedCall]]:
        step, rank = trip.step, self.host.rank
        # State first: with bad weights every call fails, and samples would be blamed for it.
        state = state_verdict(self.watched, trip.kind, step, rank)
        if state is not None and not self._is_of_loops_own(state):
            return [Found(state)]
        if trip.kind in (*OF_WEIGHTS, OF_FROZEN) and not trip.calls:
            return [Found(state)] if state is not None else []  # none: it is another rank's
        found = [
            one
            for of_rank in self.watched.shared(trip.calls, trip.controls)
            for one in call_verdicts(of_rank, self.watched, trip.kind, step)
        ]
        if state is None and trip.own_loss_is_bad and not self.lockstep:
            found = of_the_loops_loss(found, trip.calls)
        if state is None:
            return found or [Found(unseen(step, rank))]
        # A bad sample leaves its NaN in a buffer that the model writes to; it is the buffer where no sample is bad.
        return [one for one in found if one.verdict.cause in _OF_SAMPLES] or [Found(state)]

    def _is_of_loops_own(self, verdict: Verdict) -> bool:
        """Return True if all that is wrong are values that the loop itself writes."""
        record, wrong = self.watched.record, verdict.evidence.get("frozen", [])
        return record is not None and bool(wrong) and all(map(record.is_own, wrong))

    def _may_pass(self, trip: PluginTrip, verdicts: Sequence[Verdict]) -> bool:
        """Return True if the next step may be healthy: where every sample fails, no replay tells this step from all
        of them, and a loop in fp16 expects to lose some to its range.
        """
        every = all(
            verdict.evidence.get("every_sample")
            or verdict.evidence.get("of_the_loop")
            or verdict.cause == "precision"
            for verdict in verdicts
        )
        allowed = "skip" in self.config.on_nonfinite and self._policy.skips < self.config.max_skips
        return every and allowed and not trip.spoiled(verdicts)

    def _for_no_gradient(self) -> Action:
        """Skip, since now and then no gradient is no fault; stop where step after step nothing is trained."""
        if "skip" in self.config.on_nonfinite and self.budget.in_a_row < self.config.max_skips:
            return Action("skip")
        count = self.budget.in_a_row + 1
        why = f"no gradient reached a trained weight in {count} steps in a row, though the loss asks for one"
        return Action("stop", why=f"{why} (checks= without zero_gradient goes on)")

    def put_back_alone(self, step: int) -> None:
        """Put the newest good snapshot back on this rank, which is about to save bad weights. Not collective.

        Where the others are as bad, they find it at their next step and go back to the same. Raises `NonFiniteError`
        where nothing is held, and for sharded weights, of which copies were gathered before.
        """
        verdict = state_verdict(self.watched, WEIGHTS, step, self.host.rank)
        assert verdict is not None  # the weights are bad
        put_back = None if self.lockstep else self._put_back(list)
        if put_back is None:
            raise self._not_saved(step, verdict)
        event = event_of(step, WEIGHTS, verdict, "rollback", 0.0)
        self.write(replace(event, facts={"guard": self.guard_id, "weights_of_step": put_back}))
        _LOG.warning("%s; those of step %d are saved", self._about_to_save(verdict), put_back)

    def refuse_to_save(self, step: int) -> None:
        """Raise `NonFiniteError`: what this rank has gathered of others' weights has NaN. Not collective."""
        words = "what was gathered from all ranks has NaN"
        raise self._not_saved(step, Verdict("weights", words, step, self.host.rank))

    def _not_saved(self, step: int, verdict: Verdict) -> NonFiniteError:
        event = event_of(step, WEIGHTS, verdict, "stop", 0.0, {"guard": self.guard_id})
        self.write(event)
        words = f"{self._about_to_save(verdict)}; nothing was saved, for one rank alone has nothing good to put back"
        return NonFiniteError(words, event.record())

    def _about_to_save(self, verdict: Verdict) -> str:
        return f"guard: rank {self.host.rank} was about to save weights that are not finite: {verdict.words}"

    def _put_back(self, gathered: Callable[[Sequence[str]], list[str]] | None = None) -> int | None:
        """Put the newest good snapshot back and return its step; None if there is none that fits. Collective, but for
        another way to gather.
        """
        step = self.state.newest(gathered or self.host.gathered)
        if step is None:
            return None
        try:
            self.state.restore(step)
        except DitLoraError as problem:  # tensors have another shape or dtype now
            _LOG.warning("guard: %s", problem)
            return None
        return step

    def _undone(self, trip: PluginTrip, put_back: int | None) -> str:
        """Return what a snapshot that was put back costs, in words."""
        if put_back is None:
            return ""
        lost = trip.step - 1 - put_back
        every = f"; a snapshot is taken every {self.state.every} steps" if lost else ""
        return f"weights and optimizer are those of step {put_back}, {lost} steps are undone{every}"

    def _done(self, action: Action, undone: str) -> str:
        if action.kind == "fallback":
            suspects = self.watched.suspects.values()
            switches = [switch for suspect in suspects for switch in suspect.switches]
            for name in action.switches:
                find_switch(switches, name).turn_off()
                self.watched.switched_off.add(name)
            off = f"{', '.join(action.switches)} switched off for this run"
            return f"{off}; {undone or 'the step was not taken'}"
        if action.kind == "rollback" and action.lower_lr:
            self.state.lower_rates(self.config.rollback_lr)
            return f"{undone}; learning rates are multiplied by {self.config.rollback_lr:g}"
        return undone or "the step was not taken"

    def _left_behind(self, trip: PluginTrip, put_back: int | None, undone: str) -> str:
        """Return what the weights are after a stop, in words; good ones are written to the disk."""
        step = trip.step - 1 if put_back is None else put_back
        state = undone or "the weights are those of the step before"
        if self.host.under_deepspeed:  # its engine holds them
            return state
        folder = self.folder if self.folder is not None else self.host.folder
        weights = {name: p.detach() for name, p in self.state.parameters.items()}
        where = save_trained(weights, folder, step, is_main=self.host.rank == 0)
        return f"{state}; {where}" if where else state


def _of_what_is_trained(verdict: Verdict) -> bool:
    if verdict.evidence.get("frozen"):
        return False
    return verdict.cause in OF_STATE or "not_finite" in verdict.evidence


def _with_gradients(verdict: Verdict, names: Sequence[str]) -> Verdict:
    """Return the verdict with the parameters whose gradient was bad, where no replay has found the place."""
    if not names or verdict.cause in _NOT_OF_THE_LOSS:
        return verdict
    verdict = replace(verdict, evidence={**verdict.evidence, "gradients": list(names[:20])})
    if verdict.module is not None:
        return verdict
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    words = f"{verdict.words}; the gradient of {names[0]}{more} was not finite"
    return replace(verdict, words=words, module=names[0].rpartition(".")[0])
