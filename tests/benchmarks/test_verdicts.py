"""The sweep of random faults: equal seeds draw equal faults, every fault can be made, and every question can fail."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.faults import arms
from benchmarks.faults.target_table import FAULT_TARGETS
from benchmarks.faults.triggers import When, before, times
from benchmarks.faults.world import Observation
from benchmarks.verdicts import judge
from benchmarks.verdicts.__main__ import main
from benchmarks.verdicts.cases import Case, Draw, Place, Right, right
from benchmarks.verdicts.draw import draw_faults
from benchmarks.verdicts.judge import Judgement, Tally
from benchmarks.verdicts.places import PLACES
from benchmarks.verdicts.sweep import Sweep
from benchmarks.verdicts.table import failures, table
from dit_lora.data.loading.quarantine import QuarantineRecord
from dit_lora.errors import DitLoraError

EVERY = list(FAULT_TARGETS)


def test_a_seed_draws_the_same_faults_and_three_hundred_reach_every_place_and_kind() -> None:
    faults = draw_faults(5, 300, EVERY, (1, 2))
    assert faults == draw_faults(5, 300, EVERY, (1, 2))
    assert faults[:40] == draw_faults(5, 40, EVERY, (1, 2))
    assert faults != draw_faults(6, 300, EVERY, (1, 2))
    pairs = {(place_name, kind) for place_name, of_place in PLACES.items() for kind in of_place.kinds}
    assert {(fault.place_name, fault.kind) for fault in faults} == pairs
    assert {fault.variant for fault in faults} == set(EVERY)
    assert {fault.ranks for fault in faults} == {1, 2}


def test_every_place_makes_a_case_of_every_kind() -> None:
    for name, fault_place in PLACES.items():
        for kind in fault_place.kinds:
            for targets, ranks in [(s, n) for s in FAULT_TARGETS.values() for n in (1, 2) if fault_place.fits(s, n)]:
                case = fault_place.make(Draw(random.Random(0), targets, ranks, "02.mp4", kind))
                assert case.when, (name, kind)
                assert case.right.causes or not case.right.must_report, (name, kind)


ALLOWED = right("data", touches=True, switches=frozenset({"kernel:wrong_op"}))


def seen(folder: Path, cause: str = "data", error: DitLoraError | None = None) -> Observation:
    verdict = {"cause": cause, "words": "1 NaN"}
    event = {"step": 3, "verdict": verdict, "action": "quarantine"}
    return Observation([event], error, None, folder, folder, "")


def left(sample: str, to_epoch: int | None = None) -> QuarantineRecord:
    return QuarantineRecord(sample, 0, to_epoch, 3, "data", "1 NaN")


def test_only_the_target_may_be_lost() -> None:
    assert not judge._lost(ALLOWED, [left("a"), left("b", to_epoch=1)], "a")
    assert "b" in judge._lost(ALLOWED, [left("a"), left("b")], "a")
    assert "a" in judge._lost(replace(ALLOWED, touches=False), [left("a")], "a")


def test_only_what_is_wrong_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    switched_off = {"kernel:wrong_op"}
    monkeypatch.setattr(Tally, "switched_off", property(lambda tally: switched_off))
    assert not judge._off(ALLOWED, Tally())
    switched_off.add("attention:flash")
    assert judge._off(ALLOWED, Tally()) == "switched off: attention:flash"


@pytest.mark.parametrize(
    ("allowed", "cause", "wrong"),
    [
        (ALLOWED, "data", ""),
        (ALLOWED, "inputs", "inputs, and right is data: 1 NaN"),
        (right(must_report=False), "data", "data, and right is none: 1 NaN"),
        (replace(ALLOWED, message_parts=("1 Inf",)), "data", "not said: 1 Inf"),
    ],
)
def test_only_a_right_cause_may_be_named(tmp_path: Path, allowed: Right, cause: str, wrong: str) -> None:
    complaint = judge._cause(allowed, seen(tmp_path, cause), came=True)
    assert complaint.startswith(wrong)
    assert bool(complaint) == bool(wrong)


def test_what_must_be_told_is_missed(tmp_path: Path) -> None:
    silent = replace(seen(tmp_path), events=[])
    assert judge._cause(ALLOWED, silent, came=True) == "nothing was said; right is data"
    assert not judge._cause(replace(ALLOWED, must_report=False), silent, came=True)
    assert not judge._cause(ALLOWED, silent, came=False)


def test_another_end_is_told(tmp_path: Path) -> None:
    stopped = seen(tmp_path, error=DitLoraError("no such file"))
    assert judge._ended(ALLOWED, stopped) == "exit code 2, not 0 or 3: no such file"
    assert not judge._ended(ALLOWED, seen(tmp_path))
    assert judge._ended(replace(ALLOWED, ends=(3,)), seen(tmp_path)).startswith("exit code 0")


def test_the_table_counts_and_the_list_replays() -> None:
    failed = Judgement("007 latent: NaN (latte)", "latent", "NaN", "once", {"lost": "b.mp4"})
    passed_judgement = replace(failed, name="008 latent: NaN (dit-tiny)", failures={})
    assert table([failed, passed_judgement]).splitlines()[-1].split() == ["all", "2", "1", *"...."]
    text = failures([failed, passed_judgement], "python -m benchmarks.verdicts --seed 4")
    assert "--seed 4 --only 007" in text
    assert "008" not in text


@pytest.mark.slow
def test_a_sweep_finds_what_is_certified_though_it_is_not_the_clean_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that nobody can see, of which the clean result is asked; a crash; and nothing at all."""
    unseen = before(4, arms.adapter(None), times(-1.0))

    def crash(stage: object) -> None:
        raise ZeroDivisionError("an arm that breaks")

    cases = {
        "unseen": Case("before step 4", right(must_report=False), unseen),
        "crash": Case("at once", right(must_report=False), crash),
        "nothing": Case("never", right(must_report=False, ends=(0,))),
        "sample": Case(
            "from step 2",
            right("data", touches=True, ends=(0,)),
            arms.losses(times(torch.nan), arms.target_rows, When("from", 2)),
        ),
    }
    for name in list(PLACES):
        monkeypatch.delitem(PLACES, name)
    for name, case in cases.items():
        monkeypatch.setitem(PLACES, name, Place(lambda draw, case=case: case, ("one",), name))
    AcceleratorState._reset_state(reset_partial_state=True)
    faults = draw_faults(0, 4, ["dit-tiny"], (1,))
    sweep = Sweep(tmp_path, jobs=2)
    assert list(sweep.build(["dit-tiny"])) == ["dit-tiny"]
    judgements = {judgement.place: judgement for judgement in sweep.run(faults)}
    assert {name: set(judgement.failures) for name, judgement in judgements.items()} == {
        "unseen": {"certified"}, "crash": {"ended"}, "nothing": set(), "sample": set(),
    }  # fmt: skip
    assert "ZeroDivisionError: an arm that breaks" in judgements["crash"].failures["ended"]
    assert judgements["sample"].certified
    assert {line.split(" ", 1)[1] for line in judgements["sample"].told} == {"data quarantine"}


def test_the_command_describes_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--describe"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in [*PLACES, *judge.QUESTIONS])
    for arguments in (["--families", "sona"], ["--only", "999"]):
        with pytest.raises(SystemExit):
            main(["--seed", "0", *arguments])


def test_a_tensor_that_is_a_few_per_cent_wrong_is_another_adapter() -> None:
    right_one = {"a": torch.full((4,), 1e-3), "b": torch.zeros(2)}
    compare_adapters = judge._other_adapter
    assert compare_adapters(dict(right_one), right_one, exactly=True) == ""
    scaled = {**right_one, "a": right_one["a"] * 1.05}
    assert "a is 5.00% away" in compare_adapters(scaled, right_one, exactly=False)
    rounded = {**right_one, "a": right_one["a"] * 1.001}
    assert compare_adapters(rounded, right_one, exactly=False) == ""
    assert "a is 0.10% away" in compare_adapters(rounded, right_one, exactly=True)
    assert "b is" in compare_adapters({**right_one, "b": torch.ones(2)}, right_one, exactly=False)
    assert "other tensors" in compare_adapters({"a": right_one["a"]}, right_one, exactly=False)
