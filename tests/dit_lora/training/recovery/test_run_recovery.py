"""Handling of a failed step: the effect of each action and its record. Diagnosis is faked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recovering import SAMPLES, Guarded, equal, make_diagnosis

from dit_lora.config.recipe import GuardConfig
from dit_lora.data.loading.quarantine import QuarantineRecord
from dit_lora.guard import recovery
from dit_lora.guard.diagnosis import Diagnosis, make_event
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.training.recovery import run_recovery as recovery_module

KEYS = {"step", "micro_step", "rank", "kind", "sample_ids", "verdict", "action", "seconds"}


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


def test_a_transient_fault_takes_the_step_again_and_changes_nothing(guarded: Guarded) -> None:
    before = guarded.copy()
    assert guarded.fail_step(3, make_diagnosis("transient")) == 2
    assert equal(guarded.state(), before)
    assert [call[0] for call in guarded.files.calls] == ["bundle"]
    assert guarded.files.events[0]["action"] == "retry"
    assert "step 3: non-finite loss; the step is repeated" in guarded.files.said[0]


def test_a_bad_sample_is_left_out_for_good_from_the_epoch_that_met_it(guarded: Guarded) -> None:
    sample = guarded.in_step(3)[1]  # position 5, of the second epoch
    before = [guarded.in_step(step) for step in (1, 2)]
    assert guarded.fail_step(3, make_diagnosis("data", sample, micro_step=1)) == 2
    (record,) = guarded.recovery.quarantine.records
    assert record == QuarantineRecord(sample, 1, None, step=3, cause="data", reason="it is data")
    assert guarded.files.calls[1:] == [("quarantined", [sample]), ("set_aside_bad", [sample])]
    assert [guarded.in_step(step) for step in (1, 2)] == before
    assert all(sample not in guarded.in_step(step) for step in range(3, 12))
    assert "the sample is quarantined, and the step is repeated without it" in guarded.files.said[0]
    assert f"{sample} is in quarantine.jsonl until it is released\n  - marked {sample}" in guarded.files.said[0]


@pytest.mark.parametrize(
    ("cause", "text", "note"),
    [
        ("data", "2 samples are quarantined, and the step is repeated without them\n", " until it is released\n"),
        ("inputs", "the step is repeated without 2 samples, which return in the next epoch\n", "\n"),
    ],
)
def test_several_bad_samples_are_counted(guarded: Guarded, cause: str, text: str, note: str) -> None:
    first, second = guarded.in_step(3)[:2]
    guarded.fail_step(3, make_diagnosis(cause, first), make_diagnosis(cause, second, micro_step=1))
    assert f"step 3: non-finite loss; {text}" in guarded.files.said[0]
    assert f"{first} is in quarantine.jsonl{note}" in guarded.files.said[0]


def test_a_bad_draw_leaves_its_sample_out_for_one_epoch_and_the_next_time_for_good(
    guarded: Guarded,
) -> None:
    sample = guarded.in_step(1)[0]
    evidence = {"control_with_the_same_draws": "healthy"}
    assert guarded.fail_step(1, make_diagnosis("inputs", sample, evidence=evidence)) == 0
    assert [(r.from_epoch, r.to_epoch) for r in guarded.recovery.quarantine.records] == [(0, 0)]
    assert guarded.files.calls[1:] == [("quarantined", [sample])]  # its entry will be read again
    repeated_step = next(step for step in range(1, 9) if sample in guarded.in_step(step))
    micro = guarded.in_step(repeated_step).index(sample)
    guarded.fail_step(repeated_step, make_diagnosis("inputs", sample, micro_step=micro, evidence=evidence))
    assert [event["action"] for event in guarded.files.events] == ["skip", "quarantine"]
    assert guarded.recovery.quarantine.is_copy_quarantined(sample, 5)
    assert [record.evidence["control_with_the_same_draws"] for record in guarded.recovery.quarantine.records] == [
        "healthy"
    ] * 2


def test_a_step_that_fails_whatever_its_samples_is_left_out_and_none_of_them_is(
    guarded: Guarded,
) -> None:
    assert guarded.fail_step(3, make_diagnosis("step")) == 3
    assert guarded.files.calls[1:] == [("left_out", 3)]
    assert guarded.recovery.quarantine.records == []
    assert "step 3: non-finite loss; the step is left out, because no sample is the cause" in guarded.files.said[0]
    assert guarded.files.events[0]["action"] == "skip"


def test_a_rank_at_fault_stops_the_run_with_the_last_good_step_saved(guarded: Guarded) -> None:
    with pytest.raises(NonFiniteError, match="without the named device"):
        guarded.fail_step(3, make_diagnosis("rank"), make_diagnosis("data", guarded.in_step(3)[1], micro_step=1))
    assert ("save", 2) in guarded.files.calls
    assert guarded.recovery.quarantine.records == []


def test_samples_that_were_out_for_an_epoch_that_is_over_are_not_lost(guarded: Guarded) -> None:
    past = [QuarantineRecord(sample, 0, 0, step=1, cause="inputs", reason="") for sample in SAMPLES[1:]]
    guarded.recovery.quarantine.add(past)
    step = next(step for step in range(2, 9) if SAMPLES[0] in guarded.in_step(step))
    micro = guarded.in_step(step).index(SAMPLES[0])
    assert guarded.fail_step(step, make_diagnosis("inputs", SAMPLES[0], micro_step=micro)) == step - 1


def test_a_bad_backend_is_switched_off_and_stays_off(guarded: Guarded) -> None:
    diagnosis = make_diagnosis("attention_backend", switch="attention:flash")
    assert guarded.fail_step(3, diagnosis) == 2
    assert guarded.turned_off == ["attention:flash"]
    assert guarded.recovery.state.switched_off == ["attention:flash"]
    assert "attention:flash stays off for this run" in guarded.files.said[0]


def test_bad_weights_go_back_to_the_newest_snapshot_bit_for_bit(guarded: Guarded) -> None:
    snapshots = guarded.recovery.snapshots
    for step in (2, 4):
        guarded.train(step - 1, step)
        snapshots.take_snapshot(step)
    expected = guarded.copy()
    guarded.train(5, 5)
    guarded.model.weight.data[0, 0] = torch.nan
    assert guarded.fail_step(6, make_diagnosis("weights")) == 4
    assert equal(guarded.state(), expected)
    assert guarded.files.calls == [("bundle", 0, 0), ("rewind", 4, False)]  # of the bad weights
    assert guarded.recovery.state.lr_scale == 1.0


def test_going_back_to_before_the_first_update_drops_what_adamw_made_since(
    guarded: Guarded,
) -> None:
    guarded.recovery.snapshots.take_snapshot(0)
    expected = guarded.copy()
    guarded.train(1, 1)
    assert guarded.fail_step(2, make_diagnosis("optimizer")) == 0
    assert equal(guarded.state(), expected)
    assert not any(guarded.optimizer.state.values())


def test_a_rollback_that_did_not_help_goes_further_back_and_lowers_the_rates(
    guarded: Guarded,
) -> None:
    for step in (2, 4):
        guarded.train(step - 1, step)
        guarded.recovery.snapshots.take_snapshot(step)
    assert guarded.fail_step(5, make_diagnosis("weights")) == 4
    assert guarded.fail_step(5, make_diagnosis("weights")) == 2
    assert guarded.recovery.state.lr_scale == 0.5
    rewinds = [call for call in guarded.files.calls if call[0] == "rewind"]
    assert rewinds == [("rewind", 4, False), ("rewind", 2, True)]
    assert "learning rates are now 0.5 times the recipe's" in guarded.files.said[1]


def test_a_learning_rate_that_is_too_high_is_lowered_the_first_time(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, rollback_lr=0.25)
    guarded.recovery.snapshots.take_snapshot(0)
    assert guarded.fail_step(2, make_diagnosis("learning_rate")) == 0
    assert guarded.fail_step(1, make_diagnosis("learning_rate")) == 0
    assert guarded.recovery.state.lr_scale == 0.0625


def test_a_snapshot_that_is_not_finite_is_passed_over(guarded: Guarded) -> None:
    snapshots = guarded.recovery.snapshots
    snapshots.take_snapshot(2)
    guarded.model.bias.data[0] = torch.inf
    snapshots.take_snapshot(4)
    assert guarded.fail_step(6, make_diagnosis("weights")) == 2
    assert torch.isfinite(guarded.model.bias).all()
    assert snapshots.steps == [2]


def test_a_snapshot_that_is_bad_on_another_rank_is_passed_over_here_too(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(own: list[Any]) -> list[Any]:
        return own or other_answers.pop(0)  # a snapshot that is finite here

    other_answers: list[list[str]] = [["lora_A"], []]
    monkeypatch.setattr(recovery_module, "gather_object", gathered)
    for step in (2, 4):
        guarded.recovery.snapshots.take_snapshot(step)
    assert guarded.fail_step(6, make_diagnosis("weights")) == 2


def test_without_a_finite_snapshot_it_stops(guarded: Guarded) -> None:
    guarded.model.bias.data[0] = torch.nan
    guarded.recovery.snapshots.take_snapshot(2)
    with pytest.raises(NonFiniteError, match="stopped: no finite snapshot is left"):
        guarded.fail_step(3, make_diagnosis("weights"))


@pytest.mark.parametrize("action", ["retry", "quarantine", "rollback", "stop"])
def test_an_event_has_the_contracts_keys_and_no_other(tmp_path: Path, action: str) -> None:
    guarded = Guarded(tmp_path, **({"on_nonfinite": ["stop"]} if action == "stop" else {}))
    guarded.recovery.snapshots.take_snapshot(0)
    sample = guarded.in_step(2)[0]
    cause, samples = {"retry": ("transient", []), "rollback": ("weights", [])}.get(action, ("data", [sample]))
    try:
        guarded.fail_step(2, make_diagnosis(cause, *samples))
    except NonFiniteError:
        assert action == "stop"
    (event,) = guarded.files.events
    assert set(event) == {*KEYS, "bundle"}
    assert event["action"] == action
    assert (event["step"], event["micro_step"], event["rank"]) == (2, 0, 0)
    assert (event["kind"], event["sample_ids"]) == ("non_finite_loss", samples)
    assert (event["verdict"]["cause"], event["bundle"]) == (cause, "bundles/0")


def joined_by(patch: pytest.MonkeyPatch, *theirs: Diagnosis, **bundles: str) -> None:
    """Another rank's diagnoses on the next failed step and its bundle, gathered with the local ones."""
    waiting = [list(theirs), [{(1, 0): name} for name in bundles.values()]]

    def gathered(own: list[Any]) -> list[Any]:
        return own + (waiting.pop(0) if waiting else [])

    patch.setattr(recovery, "gather_object", gathered)


def test_a_rank_that_has_nothing_to_say_is_silent_beside_one_that_has(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = guarded.in_step(2)[0]
    joined_by(monkeypatch, make_diagnosis("data", sample, step=2, rank=1))
    guarded.fail_step(2, make_diagnosis("transient"))
    (event,) = guarded.files.events
    assert (event["rank"], event["sample_ids"], event["action"]) == (1, [sample], "quarantine")
    assert set(event) == KEYS
    assert [record.sample_id for record in guarded.recovery.quarantine.records] == [sample]
    assert "bundle" not in [call[0] for call in guarded.files.calls]


def test_bad_samples_of_two_ranks_are_left_out_together(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = guarded.in_step(2)
    joined_by(monkeypatch, make_diagnosis("data", theirs, step=2, rank=1), bundle="bundles/theirs")
    guarded.fail_step(2, make_diagnosis("data", ours))
    bundles = {event["rank"]: event["bundle"] for event in guarded.files.events}
    assert bundles == {0: "bundles/0", 1: "bundles/theirs"}
    assert [r.sample_id for r in guarded.recovery.quarantine.records] == [ours, theirs]
    assert guarded.recovery.policy.skips == 1
    assert [call for call in guarded.files.calls if call[0] == "bundle"] == [("bundle", 0, 0)]


def test_weights_outrank_samples_and_when_all_are_transient_one_diagnosis_is_kept(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.recovery.snapshots.take_snapshot(1)
    joined_by(monkeypatch, make_diagnosis("weights", step=2, rank=1))
    assert guarded.fail_step(2, make_diagnosis("data", guarded.in_step(2)[0])) == 1
    assert {event["action"] for event in guarded.files.events} == {"rollback"}
    assert guarded.recovery.quarantine.records == []
    joined_by(monkeypatch, make_diagnosis("transient", step=3, rank=1))
    guarded.fail_step(3, make_diagnosis("transient"), make_diagnosis("transient", micro_step=1))
    assert [event["action"] for event in guarded.files.events[2:]] == ["retry"]


@pytest.mark.parametrize(("value", "cause"), [(torch.nan, "weights"), (2e3, "learning_rate")])
def test_bad_weights_are_judged_as_they_are_and_no_micro_batch_is_blamed(
    guarded: Guarded, value: float, cause: str
) -> None:
    guarded.recovery.snapshots.take_snapshot(2)
    guarded.model.weight.data[0] = value
    kind = "non_finite_weights" if cause == "weights" else "diverged_weights"
    assert guarded.fail_step(3, kind=kind) == 2
    (event,) = guarded.files.events
    assert (event["verdict"]["cause"], event["micro_step"]) == (cause, None)
    assert guarded.recovery.state.lr_scale == (1.0 if cause == "weights" else 0.5)


def test_a_stop_says_which_budget_is_used_up(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, max_skips=0)
    with pytest.raises(NonFiniteError, match=r"stopped: guard\.max_skips=0 is used up"):
        guarded.fail_step(2, make_diagnosis("data", guarded.in_step(2)[0]))


def test_a_bundle_of_an_earlier_start_counts_towards_the_limit(guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "bundles" / "step_000003_rank_0_micro_step_0").mkdir(parents=True)
    session = SimpleNamespace(dir=tmp_path)
    setup = SimpleNamespace(session=session, recipe=SimpleNamespace(guard=GuardConfig(bundles=1)))
    run: Any = SimpleNamespace(setup=setup)
    files = recovery_module.RecoveryFileUpdater(run, None, None, None)  # type: ignore[arg-type]
    event = make_event(7, "non_finite_loss", make_diagnosis("data", step=7), "quarantine", 0.0)
    assert files.write_replay_bundle(guarded.micro_batch(7, 0), event) is None
