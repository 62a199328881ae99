"""Each cause is answered by the first rung that fits it, in the ladder's order and within budgets."""

import json
from collections.abc import Sequence
from typing import get_args

import pytest

from dit_lora.config.ladder import LadderConfig
from dit_lora.guard.diagnosis import Cause, Diagnosis
from dit_lora.guard.recovery import Action, Policy

Ladder = tuple[str, ...]
DEFAULT: Ladder = LadderConfig.on_nonfinite
OF_STATE = ("weights", "optimizer", "learning_rate")
OF_SWITCHES = ("kernel", "attention_backend")


def verdict(cause: Cause, *samples: str, switch: str | None = None, **facts: object) -> Diagnosis:
    if cause in OF_SWITCHES and switch is None:
        switch = f"{cause}:a"
    return Diagnosis(
        cause,
        "in words",
        7,
        1,
        sample_ids=samples,
        switch=switch,
        **facts,  # type: ignore[arg-type]
    )


def policy(ladder: Sequence[str] = DEFAULT, **budgets: int) -> Policy:
    return Policy(LadderConfig(on_nonfinite=tuple(ladder), **budgets))


def chosen(causes: Sequence[Diagnosis], ladder: Sequence[str] = DEFAULT, skipped: Sequence[str] = ()) -> Action:
    return policy(ladder).choose(7, causes, skipped)


BY_CAUSE: dict[str, tuple[tuple[str, ...], Action]] = {
    "data": (("a", "b"), Action("quarantine", samples=("a", "b"))),
    "labels": (("b",), Action("quarantine", samples=("b",))),
    "inputs": (("a",), Action("skip", samples=("a",))),
    "unknown": (("b", "a"), Action("skip", samples=("b", "a"))),
    "step": (("b",), Action("skip", samples=("b",))),
    "kernel": ((), Action("fallback", fallbacks=("kernel:a",))),
    "attention_backend": (("a",), Action("fallback", fallbacks=("attention_backend:a",))),
    "weights": ((), Action("rollback")),
    "optimizer": (("a",), Action("rollback")),
    "learning_rate": ((), Action("rollback", should_lower_lr=True)),
    "transient": ((), Action("retry")),
}


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_each_cause_has_its_rung_on_the_whole_ladder(cause: Cause) -> None:
    samples, action = BY_CAUSE[cause]
    assert chosen([verdict(cause, *samples)]) == action
    assert {*BY_CAUSE, "precision", "rank"} == {*get_args(Cause)}


@pytest.mark.parametrize("cause", ["precision", "unknown", "data", "inputs", "labels"])
def test_a_cause_that_names_no_sample_stops(cause: Cause) -> None:
    """The same values would leave the dtype's range again at the next step."""
    assert chosen([verdict(cause)]).kind == "stop"


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_a_ladder_of_stop_alone_always_stops(cause: Cause) -> None:
    action = chosen([verdict(cause, "a")], ["stop"])
    assert action == Action("stop", reason="no rung of guard.on_nonfinite [stop] fits")


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_a_rung_before_the_one_that_fits_is_passed_and_one_after_stop_is_not_reached(
    cause: Cause,
) -> None:
    samples, action = BY_CAUSE[cause]
    action_name = {"retry": "skip"}.get(action.kind, action.kind)
    other_actions = [
        candidate for candidate in DEFAULT if candidate not in (action_name, "stop", "skip", "quarantine")
    ]
    assert chosen([verdict(cause, *samples)], [*other_actions, action_name, "stop"]) == action
    assert chosen([verdict(cause, *samples)], ["stop", action_name]).kind == "stop"


MISSING: list[tuple[Cause, Ladder, str]] = [
    ("data", ("skip", "stop"), "skip"),
    ("labels", ("skip", "fallback", "rollback"), "skip"),
    ("inputs", ("quarantine", "stop"), "stop"),
    ("unknown", ("rollback", "quarantine"), "stop"),
    ("step", ("rollback", "quarantine"), "stop"),
    ("data", ("fallback", "rollback"), "stop"),
    ("transient", ("quarantine",), "retry"),
    ("transient", ("fallback", "rollback", "stop"), "stop"),
    ("kernel", ("skip", "quarantine", "rollback"), "stop"),
    ("attention_backend", ("rollback", "skip", "stop"), "stop"),
    ("weights", ("skip", "quarantine", "fallback"), "stop"),
    ("learning_rate", ("skip", "fallback", "stop"), "stop"),
]


@pytest.mark.parametrize(("cause", "ladder", "kind"), MISSING)
def test_where_the_best_rung_is_missing_the_next_that_fits_is_taken(cause: Cause, ladder: Ladder, kind: str) -> None:
    action = chosen([verdict(cause, "a", "b")], ladder)
    assert action.kind == kind
    assert action.samples == (("a", "b") if kind in ("skip", "quarantine") else ())


def test_a_ladder_that_has_nothing_to_offer_stops_and_says_so() -> None:
    action = chosen([verdict("kernel")], ["skip", "rollback"])
    assert action == Action("stop", reason="no rung of guard.on_nonfinite [skip, rollback] fits")


@pytest.mark.parametrize("ladder", [DEFAULT, ("quarantine", "skip", "stop")])
def test_a_sample_that_fails_again_with_draws_that_others_are_healthy_with_is_quarantined(
    ladder: Ladder,
) -> None:
    """No other sample that fails twice is dropped permanently: the cause may be the draw, the step or the machine."""
    diagnosis = verdict("inputs", "a", "b", evidence={"control_with_the_same_draws": "healthy"})
    assert chosen([diagnosis], ladder, skipped=["c", "d"]) == Action("skip", samples=("a", "b"))
    assert chosen([diagnosis], ladder, skipped=["c", "b"]) == Action("quarantine", samples=("b",))
    failing = verdict("inputs", "a", "b", evidence={"control_with_the_same_draws": "fails"})
    for entry in (failing, verdict("unknown", "a", "b"), verdict("step", "a", "b")):
        assert chosen([entry], ladder, skipped=["c", "b"]) == Action("skip", samples=("a", "b"))


def test_a_step_that_fails_whatever_its_samples_is_left_out_itself() -> None:
    assert chosen([verdict("step")]) == Action("skip")
    assert chosen([verdict("step")], ["quarantine", "stop"]).kind == "stop"


def test_a_rank_that_fails_alone_stops_the_run_whatever_else_is_said() -> None:
    action = chosen([verdict("data", "a"), verdict("rank"), verdict("weights")])
    assert (action.kind, action.samples) == ("stop", ())
    assert "rank 1" in action.reason


def test_weight_decay_that_overshoots_stops_for_no_snapshot_helps() -> None:
    action = chosen([verdict("optimizer", evidence={"weight_decay": 2.5})], DEFAULT[:-1])
    assert action.kind == "stop"
    assert "optim.weight_decay" in action.reason


def test_a_sample_that_was_skipped_before_is_skipped_again_where_nothing_else_may_be_done() -> None:
    action = chosen([verdict("inputs", "a")], ["skip", "stop"], skipped=["a"])
    assert action == Action("skip", samples=("a",))


def test_samples_of_all_ranks_are_left_out_once_each_in_order() -> None:
    verdicts = [verdict("inputs", "c", "a"), verdict("inputs", "b"), verdict("inputs", "a", "d")]
    assert chosen(verdicts) == Action("skip", samples=("c", "a", "b", "d"))
    mixed = [verdict("inputs", "c"), verdict("data", "b")]  # what c has trips again, and is a skip
    assert chosen(mixed) == Action("quarantine", samples=("b",))
    assert chosen(mixed, ["skip", "stop"]) == Action("skip", samples=("b",))


def test_switches_of_all_ranks_are_turned_off_once_each() -> None:
    verdicts = [
        verdict("kernel", switch="kernel:norm"),
        verdict("attention_backend", switch="attention:flash"),
        verdict("kernel", switch="kernel:norm"),
    ]
    assert chosen(verdicts) == Action("fallback", fallbacks=("attention:flash", "kernel:norm"))


def test_of_mixed_causes_state_comes_first_then_switches_then_samples() -> None:
    data, kernel, weights = verdict("data", "a"), verdict("kernel"), verdict("weights")
    for state in (weights, verdict("optimizer"), verdict("learning_rate")):
        for earlier in ([data], [kernel], [data, kernel], [verdict("transient"), data]):
            assert chosen([*earlier, state]).kind == "rollback"
            assert chosen([state, *earlier], ["skip", "fallback", "stop"]).kind == "stop"
    assert chosen([data, kernel, verdict("transient")]).kind == "fallback"
    assert chosen([data, kernel], ["skip", "quarantine", "stop"]).kind == "stop"
    assert chosen([verdict("transient"), data]) == Action("quarantine", samples=("a",))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_skips_of_every_kind_share_one_budget(budget: int) -> None:
    run = policy(DEFAULT[:-1], max_skips=budget)
    answers = [verdict("transient"), verdict("data", "a"), verdict("inputs", "b")]
    kinds = [run.choose(step, [answers[step % 3]], []).kind for step in range(budget)]
    assert kinds == ["retry", "quarantine", "skip"][:budget]
    for answer in answers:
        action = run.choose(9, [answer], [])
        assert action.kind == "stop"
        assert f"guard.max_skips={budget} is used up" in action.reason
    assert run.choose(9, [verdict("kernel")], []).kind == "fallback"
    assert run.choose(9, [verdict("weights")], []).kind == "rollback"
    assert run.skips == budget


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_rollbacks_have_their_own_budget(budget: int) -> None:
    run = policy(DEFAULT[:-1], max_rollbacks=budget)
    kinds = [run.choose(10 * step, [verdict("weights")], []).kind for step in range(1, budget + 1)]
    assert kinds == ["rollback"] * budget
    action = run.choose(50, [verdict("learning_rate")], [])
    assert action == Action("stop", reason=f"guard.max_rollbacks={budget} is used up")
    assert run.choose(51, [verdict("data", "a")], []).kind == "quarantine"
    assert run.rollbacks == budget


def test_fallbacks_and_stops_count_for_nothing() -> None:
    run = policy(max_skips=1, max_rollbacks=1)
    for step in range(1, 5):
        assert run.choose(step, [verdict("kernel")], []).kind == "fallback"
        assert run.choose(step, [verdict("precision")], []).kind == "stop"
    assert run.state_dict() == {"skips": 0, "rollbacks": 0, "last_rollback_step": 0}


@pytest.mark.parametrize(("cause", "budget"), [("data", "guard.max_skips=0"), ("weights", "guard.max_rollbacks=0")])
def test_the_default_ladder_says_which_budget_is_used_up(cause: Cause, budget: str) -> None:
    run = policy(max_skips=0, max_rollbacks=0)
    action = run.choose(3, [verdict(cause, "a")], [])
    assert action == Action("stop", reason=f"{budget} is used up")


def test_a_second_rollback_from_the_same_step_lowers_the_learning_rate() -> None:
    run = policy(max_rollbacks=5)
    lowered_flags = [run.choose(step, [verdict("weights")], []).should_lower_lr for step in (41, 41, 60, 41, 41)]
    assert lowered_flags == [False, True, False, False, True]


def test_a_learning_rate_that_is_too_high_is_lowered_the_first_time() -> None:
    mixed = [verdict("weights"), verdict("learning_rate")]
    assert chosen(mixed) == Action("rollback", should_lower_lr=True)


def test_bad_frozen_weights_stop_for_no_snapshot_holds_them() -> None:
    frozen = verdict("weights", evidence={"frozen": ["net.0.weight has 1 NaN among 12 values"]})
    action = chosen([verdict("optimizer"), frozen], DEFAULT[:-1])
    assert action == Action("stop", reason="a snapshot does not hold the frozen weights")
    assert chosen([verdict("weights", evidence={"frozen": []})]).kind == "rollback"


def test_counts_go_through_json_into_a_policy_that_goes_on_with_them() -> None:
    run = policy(DEFAULT[:-1], max_skips=3, max_rollbacks=2)
    for step in (4, 8):
        run.choose(step, [verdict("data", "a")], [])
    run.choose(41, [verdict("weights")], [])
    state = json.loads(json.dumps(run.state_dict()))
    assert state == {"skips": 2, "rollbacks": 1, "last_rollback_step": 41}
    resumed = Policy(run.config, **state)
    assert resumed.state_dict() == state
    assert resumed.choose(41, [verdict("weights")], []) == Action("rollback", should_lower_lr=True)
    assert resumed.choose(42, [verdict("data", "b")], []).kind == "quarantine"
    assert resumed.choose(43, [verdict("data", "b")], []).kind == "stop"
    assert run.state_dict() == state
