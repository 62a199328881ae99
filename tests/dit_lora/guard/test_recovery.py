"""Each cause gets the first recovery action that fits it, in the order of the list and within the limits."""

import json
from collections.abc import Sequence
from typing import get_args

import pytest

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.diagnosis import Cause, Diagnosis
from dit_lora.guard.recovery import Action, Policy

Actions = tuple[str, ...]
DEFAULT: Actions = RecoveryConfig.on_nonfinite
OF_STATE = ("weights", "optimizer", "learning_rate")
OF_SWITCHES = ("kernel", "attention_backend")


def make_diagnosis(cause: Cause, *samples: str, switch: str | None = None, **facts: object) -> Diagnosis:
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


def policy(actions: Sequence[str] = DEFAULT, **budgets: int) -> Policy:
    return Policy(RecoveryConfig(on_nonfinite=tuple(actions), **budgets))


def chosen(causes: Sequence[Diagnosis], actions: Sequence[str] = DEFAULT, skipped: Sequence[str] = ()) -> Action:
    return policy(actions).choose_and_count_action(7, causes, skipped)


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
def test_each_cause_has_its_action_in_the_default_list(cause: Cause) -> None:
    samples, action = BY_CAUSE[cause]
    assert chosen([make_diagnosis(cause, *samples)]) == action
    assert {*BY_CAUSE, "precision", "rank"} == {*get_args(Cause)}


@pytest.mark.parametrize("cause", ["precision", "unknown", "data", "inputs", "labels"])
def test_a_cause_that_names_no_sample_stops(cause: Cause) -> None:
    """The same values would leave the dtype's range again at the next step."""
    assert chosen([make_diagnosis(cause)]).kind == "stop"


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_a_list_of_stop_alone_always_stops(cause: Cause) -> None:
    action = chosen([make_diagnosis(cause, "a")], ["stop"])
    assert action == Action("stop", reason="no action of guard.on_nonfinite [stop] fits this cause")


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_an_action_before_the_one_that_fits_is_passed_and_one_after_stop_is_not_reached(
    cause: Cause,
) -> None:
    samples, action = BY_CAUSE[cause]
    action_name = {"retry": "skip"}.get(action.kind, action.kind)
    other_actions = [
        candidate for candidate in DEFAULT if candidate not in (action_name, "stop", "skip", "quarantine")
    ]
    assert chosen([make_diagnosis(cause, *samples)], [*other_actions, action_name, "stop"]) == action
    assert chosen([make_diagnosis(cause, *samples)], ["stop", action_name]).kind == "stop"


MISSING: list[tuple[Cause, Actions, str]] = [
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


@pytest.mark.parametrize(("cause", "actions", "kind"), MISSING)
def test_without_the_best_action_the_next_that_fits_is_taken(cause: Cause, actions: Actions, kind: str) -> None:
    action = chosen([make_diagnosis(cause, "a", "b")], actions)
    assert action.kind == kind
    assert action.samples == (("a", "b") if kind in ("skip", "quarantine") else ())


def test_a_list_without_a_fitting_action_stops_and_says_so() -> None:
    action = chosen([make_diagnosis("kernel")], ["skip", "rollback"])
    assert action == Action("stop", reason="no action of guard.on_nonfinite [skip, rollback] fits this cause")


@pytest.mark.parametrize("actions", [DEFAULT, ("quarantine", "skip", "stop")])
def test_a_sample_that_fails_again_with_draws_that_others_are_healthy_with_is_quarantined(
    actions: Actions,
) -> None:
    """No other sample that fails twice is dropped permanently: the cause may be the draw, the step or the machine."""
    diagnosis = make_diagnosis("inputs", "a", "b", evidence={"control_with_the_same_draws": "healthy"})
    assert chosen([diagnosis], actions, skipped=["c", "d"]) == Action("skip", samples=("a", "b"))
    assert chosen([diagnosis], actions, skipped=["c", "b"]) == Action("quarantine", samples=("b",))
    failing = make_diagnosis("inputs", "a", "b", evidence={"control_with_the_same_draws": "fails"})
    for entry in (failing, make_diagnosis("unknown", "a", "b"), make_diagnosis("step", "a", "b")):
        assert chosen([entry], actions, skipped=["c", "b"]) == Action("skip", samples=("a", "b"))


def test_a_step_that_fails_whatever_its_samples_is_left_out_itself() -> None:
    assert chosen([make_diagnosis("step")]) == Action("skip")
    assert chosen([make_diagnosis("step")], ["quarantine", "stop"]).kind == "stop"


def test_a_rank_that_fails_alone_stops_the_run_whatever_else_is_said() -> None:
    action = chosen([make_diagnosis("data", "a"), make_diagnosis("rank"), make_diagnosis("weights")])
    assert (action.kind, action.samples) == ("stop", ())
    assert "rank 1" in action.reason


def test_weight_decay_that_overshoots_stops_for_no_snapshot_helps() -> None:
    action = chosen([make_diagnosis("optimizer", evidence={"weight_decay": 2.5})], DEFAULT[:-1])
    assert action.kind == "stop"
    assert "optim.weight_decay" in action.reason


def test_a_sample_that_was_skipped_before_is_skipped_again_where_nothing_else_may_be_done() -> None:
    action = chosen([make_diagnosis("inputs", "a")], ["skip", "stop"], skipped=["a"])
    assert action == Action("skip", samples=("a",))


def test_samples_of_all_ranks_are_left_out_once_each_in_order() -> None:
    diagnoses = [make_diagnosis("inputs", "c", "a"), make_diagnosis("inputs", "b"), make_diagnosis("inputs", "a", "d")]
    assert chosen(diagnoses) == Action("skip", samples=("c", "a", "b", "d"))
    mixed = [make_diagnosis("inputs", "c"), make_diagnosis("data", "b")]  # what c has trips again, and is a skip
    assert chosen(mixed) == Action("quarantine", samples=("b",))
    assert chosen(mixed, ["skip", "stop"]) == Action("skip", samples=("b",))


def test_switches_of_all_ranks_are_turned_off_once_each() -> None:
    diagnoses = [
        make_diagnosis("kernel", switch="kernel:norm"),
        make_diagnosis("attention_backend", switch="attention:flash"),
        make_diagnosis("kernel", switch="kernel:norm"),
    ]
    assert chosen(diagnoses) == Action("fallback", fallbacks=("attention:flash", "kernel:norm"))


def test_of_mixed_causes_state_comes_first_then_switches_then_samples() -> None:
    data, kernel, weights = make_diagnosis("data", "a"), make_diagnosis("kernel"), make_diagnosis("weights")
    for state in (weights, make_diagnosis("optimizer"), make_diagnosis("learning_rate")):
        for earlier in ([data], [kernel], [data, kernel], [make_diagnosis("transient"), data]):
            assert chosen([*earlier, state]).kind == "rollback"
            assert chosen([state, *earlier], ["skip", "fallback", "stop"]).kind == "stop"
    assert chosen([data, kernel, make_diagnosis("transient")]).kind == "fallback"
    assert chosen([data, kernel], ["skip", "quarantine", "stop"]).kind == "stop"
    assert chosen([make_diagnosis("transient"), data]) == Action("quarantine", samples=("a",))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_skips_of_every_kind_share_one_budget(budget: int) -> None:
    run = policy(DEFAULT[:-1], max_skips=budget)
    answers = [make_diagnosis("transient"), make_diagnosis("data", "a"), make_diagnosis("inputs", "b")]
    kinds = [run.choose_and_count_action(step, [answers[step % 3]], []).kind for step in range(budget)]
    assert kinds == ["retry", "quarantine", "skip"][:budget]
    for answer in answers:
        action = run.choose_and_count_action(9, [answer], [])
        assert action.kind == "stop"
        assert f"guard.max_skips={budget} is used up" in action.reason
    assert run.choose_and_count_action(9, [make_diagnosis("kernel")], []).kind == "fallback"
    assert run.choose_and_count_action(9, [make_diagnosis("weights")], []).kind == "rollback"
    assert run.skips == budget


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_rollbacks_have_their_own_budget(budget: int) -> None:
    run = policy(DEFAULT[:-1], max_rollbacks=budget)
    kinds = [
        run.choose_and_count_action(10 * step, [make_diagnosis("weights")], []).kind for step in range(1, budget + 1)
    ]
    assert kinds == ["rollback"] * budget
    action = run.choose_and_count_action(50, [make_diagnosis("learning_rate")], [])
    assert action == Action("stop", reason=f"guard.max_rollbacks={budget} is used up")
    assert run.choose_and_count_action(51, [make_diagnosis("data", "a")], []).kind == "quarantine"
    assert run.rollbacks == budget


def test_fallbacks_and_stops_count_for_nothing() -> None:
    run = policy(max_skips=1, max_rollbacks=1)
    for step in range(1, 5):
        assert run.choose_and_count_action(step, [make_diagnosis("kernel")], []).kind == "fallback"
        assert run.choose_and_count_action(step, [make_diagnosis("precision")], []).kind == "stop"
    assert run.state_dict() == {"skips": 0, "rollbacks": 0, "last_rollback_step": 0}


@pytest.mark.parametrize(("cause", "budget"), [("data", "guard.max_skips=0"), ("weights", "guard.max_rollbacks=0")])
def test_the_default_list_says_which_budget_is_used_up(cause: Cause, budget: str) -> None:
    run = policy(max_skips=0, max_rollbacks=0)
    action = run.choose_and_count_action(3, [make_diagnosis(cause, "a")], [])
    assert action == Action("stop", reason=f"{budget} is used up")


def test_a_second_rollback_from_the_same_step_lowers_the_learning_rate() -> None:
    run = policy(max_rollbacks=5)
    lowered_flags = [
        run.choose_and_count_action(step, [make_diagnosis("weights")], []).should_lower_lr
        for step in (41, 41, 60, 41, 41)
    ]
    assert lowered_flags == [False, True, False, False, True]


def test_a_learning_rate_that_is_too_high_is_lowered_the_first_time() -> None:
    mixed = [make_diagnosis("weights"), make_diagnosis("learning_rate")]
    assert chosen(mixed) == Action("rollback", should_lower_lr=True)


def test_bad_frozen_weights_stop_for_no_snapshot_holds_them() -> None:
    frozen = make_diagnosis("weights", evidence={"frozen": ["net.0.weight has 1 NaN among 12 values"]})
    action = chosen([make_diagnosis("optimizer"), frozen], DEFAULT[:-1])
    assert action == Action("stop", reason="a snapshot does not hold the frozen weights")
    assert chosen([make_diagnosis("weights", evidence={"frozen": []})]).kind == "rollback"


def test_counts_go_through_json_into_a_policy_that_goes_on_with_them() -> None:
    run = policy(DEFAULT[:-1], max_skips=3, max_rollbacks=2)
    for step in (4, 8):
        run.choose_and_count_action(step, [make_diagnosis("data", "a")], [])
    run.choose_and_count_action(41, [make_diagnosis("weights")], [])
    state = json.loads(json.dumps(run.state_dict()))
    assert state == {"skips": 2, "rollbacks": 1, "last_rollback_step": 41}
    resumed = Policy(run.config, **state)
    assert resumed.state_dict() == state
    assert resumed.choose_and_count_action(41, [make_diagnosis("weights")], []) == Action(
        "rollback", should_lower_lr=True
    )
    assert resumed.choose_and_count_action(42, [make_diagnosis("data", "b")], []).kind == "quarantine"
    assert resumed.choose_and_count_action(43, [make_diagnosis("data", "b")], []).kind == "stop"
    assert run.state_dict() == state
