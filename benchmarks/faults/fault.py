"""An injected fault, what it must lead to, and the judgment of whether it did."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.triggers import ALL_RANKS, Change, Find, When, before
from benchmarks.faults.world import (
    ENGINES,
    Arm,
    Engine,
    Observation,
    Overrides,
    Tensors,
    World,
    poisoned_files,
)
from dit_lora.data.loading.quarantine import Quarantine

DONE = 0


@dataclass(frozen=True)
class Expected:
    """The verdict and the action that a fault must get."""

    cause: str
    """The verdict's cause, or `refused` where the run must not start or a file must not be written."""
    action: str
    message_parts: tuple[str, ...] = ()
    """Words, each of which must be in the verdict's words, or in the error's."""
    names_target: bool = False
    """True if the sample at fault must be named, and no other."""
    module: str | None = None
    """The end of the module's name."""
    same_as: str | None = None
    """`clean` or `without` the target: the run whose adapter this must be, bit for bit."""
    close_to: str | None = None
    """The same for a run in which other kernels ran, which round otherwise."""
    exit_code: int = DONE
    nobody_lost: bool = False
    """True if no sample may be left out for good."""
    may_be_off: tuple[str, ...] = ()
    """Switches of what is wrong too, and may be off beside the action that is expected."""


@dataclass(frozen=True)
class FaultResult:
    """One line of the table."""

    name: str
    place: str
    when: str
    named: bool
    recovered: bool
    poisoned_files: int
    action: str
    verdict: str
    why: tuple[str, ...] = ()
    """The differences from what was expected."""

    @property
    def passed(self) -> bool:
        return self.named and self.recovered and not self.poisoned_files


@dataclass(frozen=True)
class Fault:
    """One injected fault: where, when, and what must come of it."""

    name: str
    location: str
    when: str
    expected: Expected
    arm: Arm | None = None
    overrides: Overrides = ()
    before_start: Callable[[Any], None] = field(default=lambda cache: None)
    play: Callable[["Fault", World], Observation] | None = None
    """Plays the fault, where it is not put into one plain run."""
    needs: tuple[str, ...] = ()
    """Attributes of `FaultTargets` that must be true; otherwise the fault does not apply."""
    ranks: int = 1
    """The fewest ranks that it takes."""
    most_ranks: int = 8
    engines: tuple[Engine, ...] = ENGINES

    def fits(self, targets: FaultTargets, ranks: int = 1, engine: Engine = "ddp") -> bool:
        has_place = self.ranks <= ranks <= self.most_ranks and engine in self.engines
        return has_place and all(getattr(targets, need) for need in self.needs)

    def judge(self, world: World) -> FaultResult:
        """Run the fault and compare; collective."""
        if self.play is not None:
            observation = self.play(self, world)
        else:
            observation = world.observe(self.name, self.arm, self.overrides, before_start=self.before_start)
        reference_name = self.expected.same_as or self.expected.close_to
        reference = world.reference(reference_name, self.overrides) if reference_name is not None else None
        return judge_observation(self, observation, reference, world.target_clip, world.targets)


def between_steps(
    name: str,
    location: str,
    expected: Expected,
    find: Find,
    change: Change,
    step: int = 4,
    rank: int = ALL_RANKS,
    **options: Any,
) -> Fault:
    """A fault in the run's state, which is changed once, before a step."""
    when_text = f"before step {step}" + (f", rank {rank}" if rank != ALL_RANKS else "")
    return Fault(name, location, when_text, expected, before(step, find, change, rank), **options)


def from_step(
    name: str,
    location: str,
    expected: Expected,
    strike: Callable[[When], Arm],
    step: int = 3,
    rank: int = ALL_RANKS,
    **options: Any,
) -> Fault:
    """A fault that occurs in every pass from a step on."""
    when = When("from", step, rank)
    return Fault(name, location, when.description, expected, strike(when), **options)


def judge_observation(
    fault: Fault,
    observation: Observation,
    reference: Tensors | None,
    target_clip: str,
    targets: FaultTargets,
) -> FaultResult:
    """Compare what was observed with what the fault expects."""
    expected = fault.expected
    named_message, problems = _named(expected, observation, target_clip, targets)
    recovered = _recovered(expected, observation, reference)
    event = observation.events[-1] if observation.events else None
    return FaultResult(
        fault.name,
        fault.location,
        fault.when,
        named=not problems,
        recovered=not recovered,
        poisoned_files=len(poisoned_files(observation)),
        action=event["action"] if event else ("refused" if observation.error else "none"),
        verdict=named_message,
        why=(*problems, *recovered),
    )


def _named(
    expected: Expected, observation: Observation, target_clip: str, targets: FaultTargets
) -> tuple[str, list[str]]:
    """The diagnosis's message, and a list of its mistakes."""
    if expected.cause == "none":
        causes = [e["verdict"]["cause"] for e in observation.events if e["action"] != "report"]
        problems = [f"{causes} is named, and nothing is to be told"] if causes else []
        return "nothing to tell: what is damaged is passed over", problems
    if expected.cause == "refused":
        text = str(observation.error or "")
        expected_words = [targets.named(word) for word in expected.message_parts]
        return text.split("\n")[0], [f"not said: {word}" for word in expected_words if word not in text]
    verdicts = [event["verdict"] for event in observation.events]
    matching = [verdict for verdict in verdicts if verdict["cause"] == expected.cause]
    if not matching:
        if not verdicts:
            hint = "perhaps the fault never struck: check `late` and the modules in target_table.py"
            return "", [f"there is no event of cause {expected.cause}; {hint}"]
        return "", [f"cause {expected.cause} is not among {[v['cause'] for v in verdicts]}"]
    verdict = matching[0]
    expected_words = [targets.named(word) for word in expected.message_parts]
    problems = [f"not said: {word}" for word in expected_words if word not in verdict["words"]]
    if expected.names_target and verdict["sample_ids"] != [target_clip]:
        problems.append(f"names {verdict['sample_ids']}, not {target_clip}")
    module = targets.named(expected.module or "")
    if not (verdict.get("module") or "").endswith(module):
        problems.append(f"module {verdict.get('module')}, not {module}")
    return verdict["words"], problems


def _recovered(expected: Expected, observation: Observation, reference: Tensors | None) -> list[str]:
    code = observation.error.exit_code if observation.error else DONE
    problems = []
    if code != expected.exit_code:
        problems.append(f"exit code {code}, not {expected.exit_code}: {observation.error}")
    actions = [event["action"] for event in observation.events]
    if expected.cause not in ("refused", "none") and expected.action not in actions:
        problems.append(f"action {expected.action} is not among {actions}")
    # A switch that is off for nothing costs speed for the rest of the run: as wrong as a missed one.
    switched_off = {event["verdict"].get("switch") for event in observation.events if event["action"] == "fallback"}
    if expected.action != "fallback" and (right := switched_off - {*expected.may_be_off}):
        problems.append(f"switched off, though nothing is wrong with it: {right}")
    if expected.nobody_lost and (lost_samples := find_lost_samples(observation)):
        problems.append(f"left out for good: {lost_samples}")
    # The proof of a recovery: bit for bit the adapter of a run that never had the fault.
    if reference is not None and not equal(observation.adapter, reference, expected.close_to is None):
        problems.append("the adapter is not that of the run it must equal")
    return problems


def find_lost_samples(observation: Observation) -> list[str]:
    """IDs of the samples that a run quarantined without an end."""
    records = Quarantine.load(observation.folder / "quarantine.jsonl").records
    return [record.sample_id for record in records if record.to_epoch is None]


def equal(adapter: Tensors | None, reference: Tensors, exactly: bool = True) -> bool:
    """True if both adapters are bitwise equal or, unless `exactly`, within the rounding of other kernels."""
    if adapter is None or adapter.keys() != reference.keys():
        return False
    if exactly:
        return all(torch.equal(adapter[name], reference[name]) for name in adapter)
    return all(torch.allclose(adapter[name], reference[name], rtol=0, atol=1e-4) for name in adapter)
