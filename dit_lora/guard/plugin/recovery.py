"""Act on a tripped step of a loop that is not ours, and say and write what was done."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.files import append_line
from dit_lora.guard.event import Event, event_of
from dit_lora.guard.gate import NonFiniteError
from dit_lora.guard.plugin.budget import SkipBudget
from dit_lora.guard.plugin.bundles import Bundles
from dit_lora.guard.plugin.diagnosis import Blamed, call_verdicts, state_verdict, unseen
from dit_lora.guard.plugin.host import Host
from dit_lora.guard.plugin.loop_state import LoopState
from dit_lora.guard.plugin.recorded_calls import CapturedCall
from dit_lora.guard.plugin.saved import save_trained
from dit_lora.guard.plugin.watched import Watched
from dit_lora.guard.policy import Action, Policy
from dit_lora.guard.switches import find_switch
from dit_lora.guard.verdict import Verdict

_LOG = logging.getLogger("dit_lora")
WEIGHTS = "non_finite_weights"
OF_WEIGHTS = (WEIGHTS, "altered_state", "diverged_weights")
OF_FROZEN = "altered_frozen"
_SINCE_THE_LAST_SAVE = (
    "what was trained since the last save may have met the damage; if the loop itself writes there, give checks= "
    "without frozen"
)
_OF_SAMPLES = ("data", "labels", "inputs")
_OF_STATE = ("weights", "optimizer", "learning_rate")
_NOT_OF_THE_LOSS = ("kernel", "attention_backend", "rank", *_OF_STATE)


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
    by_scaler: bool = False
    """True if the loop's gradient scaler has left the step out, as it does for what is beyond fp16."""
    between_steps: bool = False
    """True if what is held was found wrong at a save: no step is lost."""

    def spoiled(self, verdicts: Sequence[Verdict]) -> bool:
        """Return True if what is trained is not as a step left it, so that leaving this one out is not enough."""
        return self.kind in OF_WEIGHTS or self.moved or any(map(_of_what_is_trained, verdicts))


@dataclass
class PluginRecovery:
    """Names the cause of a trip and acts, on all ranks alike."""

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

    def recover(self, trip: PluginTrip) -> bool:
        """Act, and return whether weights were put back; raises `NonFiniteError` on every rank if nothing fits."""
        began = time.perf_counter()
        here = self._verdicts_here(trip)
        verdicts = self._agreed(trip, [blamed.verdict for blamed in here])
        spoiled = trip.spoiled(verdicts)
        known_bad = not spoiled and self.budget.knows(verdicts)
        action = self._action(trip, verdicts, known=known_bad)
        if action.kind == "skip":
            self.budget.skip(trip.kind, trip.step, verdicts)
        elif not trip.between_steps:
            self.budget.lose()
        seconds = time.perf_counter() - began
        events = [event_of(trip.step, trip.kind, v, action.kind, seconds) for v in verdicts]
        # A bundle holds the weights that the step failed with. What is known has one.
        bundles = {} if known_bad else self._bundled(here, events)
        # Before a stop too: what a run leaves behind must be good.
        put_back = self._put_back() if spoiled or action.kind == "rollback" else None
        if put_back is None and action.kind == "rollback":
            action = Action("stop", why="the snapshot that is held does not fit any more")
        facts: dict[str, Any] = {"guard": self.guard_id} | ({"known": True} if known_bad else {})
        facts |= {"weights_of_step": put_back} if put_back is not None else {}
        for event in events:
            place = (event.rank, event.micro_step)
            bundle = {"bundle": bundles[place]} if place in bundles else {}
            self._write(replace(event, action=action.kind, facts={**facts, **bundle}))
        lines = list(dict.fromkeys(map(self._line, verdicts)))
        head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}"
        undone = self._undone(trip, put_back)
        if action.kind == "stop":
            state = "the weights are not to be used"
            if put_back is not None or not spoiled:
                state = self._left_behind(trip, put_back, undone)
            if trip.kind == OF_FROZEN:
                state += f"; {_SINCE_THE_LAST_SAVE}"
            self.note()
            message = listed(f"{head}; {state}; stopped: {action.why}", lines)
            raise NonFiniteError(message, self.events[-1])
        done = self._done(action, undone)
        self.note()
        # A sample that is known to be bad, or one more step without a gradient, is no news.
        told = known_bad or (trip.kind == "zero_gradient" and self.budget.in_a_row > 1)
        if self.host.rank == 0 and not told:
            _LOG.warning("%s", listed(f"{head}; {done}", lines))
        return put_back is not None

    def _agreed(self, trip: PluginTrip, here: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts that count, of all ranks. Collective."""
        # In lockstep all ranks have diagnosed the same calls: gathering would repeat each verdict.
        verdicts = list(here) if self.watched.lockstep else self.host.gathered(here)
        verdicts = verdicts or [unseen(trip.step, self.host.rank)]
        # A rank whose run was healthy again has nothing to say beside one that found a cause.
        telling = [verdict for verdict in verdicts if verdict.cause != "transient"]
        return telling or verdicts[:1]

    def _verdicts_here(self, trip: PluginTrip) -> list[Blamed]:
        return [
            replace(blamed, verdict=_with_gradients(blamed.verdict, trip.gradients))
            for blamed in self._found_here(trip)
        ]

    def _found_here(self, trip: PluginTrip) -> list[Blamed]:
        step, rank = trip.step, self.host.rank
        # State first: with bad weights every call fails, and samples would be blamed for it.
        state = state_verdict(self.watched, trip.kind, step, rank)
        if state is not None and not self._is_of_loops_own(state):
            return [Blamed(state)]
        if trip.kind in (*OF_WEIGHTS, OF_FROZEN) and not trip.calls:
            return [Blamed(state)] if state is not None else []  # none: it is another rank's
        found = [
            blamed
            for of_rank in self.watched.shared(trip.calls, trip.controls)
            for blamed in call_verdicts(of_rank, self.watched, trip.kind, step)
        ]
        if state is None:
            return found or [Blamed(unseen(step, rank))]
        # A bad sample leaves its NaN in a buffer that the model writes to; it is the buffer where no sample is bad.
        return [one for one in found if one.verdict.cause in _OF_SAMPLES] or [Blamed(state)]

    def _bundled(
        self, here: Sequence[Blamed], events: Sequence[Event]
    ) -> dict[tuple[int, int | None], str]:
        """Write this process's bundles, and return the paths of all by rank and micro-step. Collective."""
        by_place = {(event.rank, event.micro_step): event for event in events}
        written = {}
        for blamed in here:
            place = (blamed.verdict.rank, blamed.verdict.micro_step)
            if blamed.call is None or place not in by_place:
                continue
            event = by_place[place].record()
            # What is switched off before this event's own answer.
            facts = {
                "switched_off": sorted(self.watched.switched_off),
                "start_peak": self.watched.suspects[id(blamed.call.owner)].start_peak,
            }
            path = self._bundles.write(blamed.call, event, facts, all_of=self.watched.lockstep)
            if path is not None:
                written[place] = path
        # The main process writes the events, and only the rank that wrote a bundle knows of it.
        everybodys = self.host.gathered([written])
        return {place: path for one in everybodys for place, path in one.items()}

    def _is_of_loops_own(self, verdict: Verdict) -> bool:
        """Return True if all that is wrong are values that the loop itself writes."""
        record, wrong = self.watched.record, verdict.evidence.get("frozen", [])
        return record is not None and bool(wrong) and all(map(record.is_own, wrong))

    def _action(self, trip: PluginTrip, verdicts: Sequence[Verdict], *, known: bool) -> Action:
        of_the_loss = not any(verdict.cause in _NOT_OF_THE_LOSS for verdict in verdicts)
        if trip.kind == "zero_gradient" and of_the_loss:
            return self._for_no_gradient()
        # Before what is known: while every step is lost, to whatever, nothing is trained.
        if self.budget.barren(self.config.max_skips):
            return Action("stop", why=f"none of the last {self.budget.in_a_row} steps was taken")
        if known:
            return Action("skip")
        self._policy.skips = self.budget.spent(trip.step)
        if self._may_pass(trip, verdicts):
            return Action("skip")
        skipped = [sample for event in self.events for sample in event["sample_ids"]]
        action = self._policy.choose(trip.step, verdicts, skipped)
        return self._feasible(action, spoiled=trip.spoiled(verdicts))

    def _may_pass(self, trip: PluginTrip, verdicts: Sequence[Verdict]) -> bool:
        """Return True if the next step may be healthy: where every sample fails, no replay tells this step from all
        of them, and a loop with a gradient scaler expects to lose some to fp16.
        """
        every = all(
            verdict.evidence.get("every_sample")
            or (trip.by_scaler and verdict.cause == "precision")
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

    def _feasible(self, action: Action, *, spoiled: bool) -> Action:
        """Return what can be done here: which samples come next is the loop's own affair, so that it is not to step."""
        if action.kind in ("retry", "quarantine"):
            action = replace(action, kind="skip")
        needs_one = action.kind == "rollback" or (spoiled and action.kind != "stop")
        if needs_one and self.state.newest(self.host.gathered) is None:
            off = "" if self.state.every else ", for guard.snapshot_every is 0"
            return Action("stop", why=f"no snapshot that is finite is held{off}")
        return action

    def _put_back(self) -> int | None:
        """Put the newest good snapshot back and return its step; None if there is none that fits."""
        step = self.state.newest(self.host.gathered)
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

    def _line(self, verdict: Verdict) -> str:
        where = f"rank {verdict.rank}"
        names = ", ".join(verdict.sample_ids)
        if names and self.host.ranks > 1:
            names = f"{names} ({where})"
        return f"{names or where}: {verdict.words}"

    def _write(self, event: Event) -> None:
        self.events.append(event.record())
        if self.folder is not None and self.host.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / "events.jsonl", json.dumps(self.events[-1]))


def _of_what_is_trained(verdict: Verdict) -> bool:
    if verdict.evidence.get("frozen"):
        return False
    return verdict.cause in _OF_STATE or "not_finite" in verdict.evidence


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
