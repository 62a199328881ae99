"""The questions asked of a fault's run, and the clean run that its result is compared with."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.faults.world import Observation, Overrides, Stage, Tensors, World
from benchmarks.verdicts.cases import Case, Right
from dit_lora.commands.verify import find_target
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord
from dit_lora.numerics.ranks import broadcast_object, gather_object
from dit_lora.verify.output_fingerprint import compare_output

QUESTIONS = {
    "lost": "is a sample left out for good that the fault did not touch?",
    "off": "is a kernel, attention backend or switch off that is right?",
    "certified": "is a file certified whose stock output is not that of the clean run?",
    "ended": "did it end otherwise than as it may, within its budget of recoveries and time?",
    "cause": "is a cause named that the fault does not allow, or none where one must be?",
}
RECOVERIES = 30
"""More than every budget of a run together."""
_OTHER_KERNELS = 0.01
"""Relative distance of an adapter's tensor that six steps with other kernels may leave by rounding."""
_BOUND = 10.0
"""The largest sound trained value: far beyond what six healthy steps reach."""


class EndlessError(RuntimeError):
    """The guard recovered more often than its budgets allow."""


@dataclass
class Tally:
    """Observations of a run that are not in its files."""

    recoveries: int = 0
    stage: Stage | None = None

    def arm(self, stage: Stage) -> None:
        self.stage = stage

        def counted(recover: Callable[..., int], *args: Any) -> int:
            self.recoveries += 1
            if self.recoveries > RECOVERIES:
                skips = stage.run.recovery.policy.skips
                raise EndlessError(f"{RECOVERIES} recoveries, of which {skips} were counted")
            return recover(*args)

        stage.wrap(stage.run.recovery, "recover", counted)

    def acted(self) -> bool:
        """Whether the fault acted on any rank, as far as it waits for a moment that may not come. Collective."""
        counts: list[int | None] = gather_object([self.stage.acted if self.stage else None])
        return None in counts or any(counts)

    @property
    def switched_off(self) -> set[str]:
        return set(self.stage.run.recovery.state.switched_off) if self.stage else set()


@dataclass(frozen=True)
class Judgement:
    """What came of one fault."""

    name: str
    place: str
    kind: str
    when: str
    failures: dict[str, str] = field(default_factory=dict)
    """What failed, in words, by question."""
    told: list[str] = field(default_factory=list)
    """Each event's step, cause and action."""
    exit_code: int | None = None
    certified: bool = False
    recoveries: int = 0
    seconds: float = 0.0


def failures_of(case: Case, world: World, observation: Observation, tally: Tally) -> dict[str, str]:
    """The failed questions with their answers. Collective, because a clean run may be needed."""
    records = Quarantine.load(observation.folder / "quarantine.jsonl").records
    answers = {
        "lost": _lost(case.right, records, world.target_clip),
        "off": _off(case.right, tally),
        "ended": _ended(case.right, observation),
        "cause": _cause(case.right, observation, came=tally.acted()),
        "certified": _certified(case, world, observation, records),
    }
    return {question: answer for question, answer in answers.items() if answer}


def is_certified(observation: Observation) -> bool:
    """Whether a file was written as good."""
    path = observation.folder / "verification.json"
    return (
        observation.error is None
        and bool(observation.adapter)
        and path.exists()
        and json.loads(path.read_text(encoding="utf-8"))["passed"]
    )


def acted(observation: Observation) -> list[dict[str, Any]]:
    """Events that are more than reports."""
    return [event for event in observation.events if event["action"] != "report"]


def _lost(allowed: Right, records: Sequence[QuarantineRecord], target: str) -> str:
    for_good = {record.sample_id for record in records if record.to_epoch is None}
    innocent = for_good - ({target} if allowed.touches else set())
    return f"left out for good: {', '.join(sorted(innocent))}" if innocent else ""


def _off(allowed: Right, tally: Tally) -> str:
    innocent = tally.switched_off - allowed.switches
    return f"switched off: {', '.join(sorted(innocent))}" if innocent else ""


def _ended(allowed: Right, observation: Observation) -> str:
    code = observation.error.exit_code if observation.error else 0
    if code in allowed.ends:
        return "" if code == 0 or str(observation.error).strip() else "stopped without a word"
    expected = " or ".join(map(str, allowed.ends))
    return f"exit code {code}, not {expected}: {str(observation.error or 'it went on').splitlines()[0]}"


def _cause(allowed: Right, observation: Observation, *, came: bool) -> str:
    verdicts = [event["verdict"] for event in acted(observation)]
    unexpected = [verdict for verdict in verdicts if verdict["cause"] not in allowed.causes]
    if unexpected:
        causes = ", ".join(sorted(allowed.causes)) or "none"
        return f"{unexpected[0]['cause']}, and right is {causes}: {unexpected[0]['words'][:160]}"
    if allowed.must_report and came and not verdicts and observation.error is None:
        return f"nothing was said; right is {', '.join(sorted(allowed.causes))}"
    messages = " ".join([*(verdict["words"] for verdict in verdicts), str(observation.error or "")])
    if (
        allowed.message_parts
        and (verdicts or observation.error)
        and not any(w in messages for w in allowed.message_parts)
    ):
        return f"not said: {' or '.join(allowed.message_parts)}: {messages[:160]}"
    return ""


def _certified(case: Case, world: World, observation: Observation, records: Sequence[QuarantineRecord]) -> str:
    if not is_certified(observation):
        return ""
    assert observation.adapter is not None
    peak = max(float(tensor.abs().max()) for tensor in observation.adapter.values())
    if not peak < _BOUND:  # not a number too
        return f"the certified adapter reaches {peak:.3g}"
    if case.right.result == "bounded":
        noted_output = find_target(observation.folder, None).metadata["output"]
        return _other_output(observation.folder, noted_output, "the run")
    overrides = tuple(override for override in case.overrides if not override[0].startswith("guard."))
    reference = load_adapter(clean_run(world, overrides, records))
    return _other_adapter(observation.adapter, reference, exactly=not case.right.switches)


def _other_adapter(adapter: Tensors, reference: Tensors, *, exactly: bool) -> str:
    """Name the tensor that is furthest from the clean run's; outputs would hide one that is a few per cent wrong.

    Unless `exactly`, what other kernels round is allowed.
    """
    if adapter.keys() != reference.keys():
        return "the adapter has other tensors than the clean run's"
    limit = 0.0 if exactly else _OTHER_KERNELS
    differences = {
        name: float((adapter[name] - tensor).norm() / tensor.norm()) if tensor.any() else float(adapter[name].any())
        for name, tensor in reference.items()
    }
    name = max(differences, key=differences.__getitem__)
    if differences[name] <= limit:
        return ""
    return f"the adapter is not the clean run's: {name} is {differences[name]:.2%} away"


def clean_run(world: World, overrides: Overrides, records: Sequence[QuarantineRecord]) -> Path:
    """The folder of a faultless run that leaves the same samples out of the same epochs. Made once; collective."""
    entries = [(record.sample_id, record.from_epoch, record.from_copy, record.to_epoch) for record in records]
    text = json.dumps([world.accelerator.num_processes, overrides, sorted(entries, key=str)])
    key = blake2b(text.encode(), digest_size=8).hexdigest()
    folder = world.root / "clean" / key
    if broadcast_object(folder.exists()):  # other jobs may be making it: all ranks do as the first one saw
        return folder

    def leave_out(stage: Stage) -> None:
        stage.run.recovery.quarantine.add(records)
        stage.run.recovery.order.reset()

    name = f"clean_{key}_{_unique(world)}"
    observation = world.observe(name, leave_out, overrides)
    if observation.error is not None:
        raise RuntimeError(f"the clean run failed: {observation.error}")
    world.accelerator.wait_for_everyone()  # the other ranks have read what is about to be renamed
    if world.accelerator.is_main_process and not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        try:
            observation.folder.rename(folder)
        except OSError:
            if not folder.exists():  # another job was first
                raise
    world.accelerator.wait_for_everyone()
    return folder


def _unique(world: World) -> int:
    """A number that no other job uses, equal on all ranks."""
    import os

    return broadcast_object(os.getpid())


def load_adapter(folder: Path) -> Tensors:
    files = sorted((folder / "adapter").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _other_output(folder: Path, noted: Mapping[str, Any], source: str) -> str:
    """What the file gives in its stock model, loaded afresh, against an output that was noted."""
    target = find_target(folder, None)
    stock = target.open_reference_model()
    fresh = stock.load_adapter(stock.load_model(torch.float32), target.file)
    check = compare_output(stock, fresh, noted, torch.float32, source)
    return "" if check.passed else f"the stock output is not {source}'s: {check.message[:160]}"
