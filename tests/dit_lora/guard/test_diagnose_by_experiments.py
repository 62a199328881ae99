"""A change in a replay is the cause only if every repetition agrees; samples are named only with evidence."""

import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from diagnoses import (
    IDS,
    Block,
    Change,
    Net,
    batch,
    diagnosed,
    fails,
    overflows_at_large_values,
    switch,
)

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.frozen_weights import FrozenWeightDigests
from dit_lora.guard.replay import MicroBatch


@pytest.fixture
def model() -> Net:
    return Net()


def by_turns(*outcomes: bool) -> Change:
    """Losses that are healthy, or not, by the number of the run; the last outcome stays."""
    remaining = list(outcomes)

    def change(losses: torch.Tensor) -> torch.Tensor:
        healthy = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return losses if healthy else losses / 0

    return change


@pytest.mark.parametrize("outcomes", [(False, True), (False,) * 3 + (True,) * 3 + (False,)])
def test_a_run_that_comes_out_otherwise_now_and_then_is_transient_with_its_rate(
    model: Net, outcomes: tuple[bool, ...]
) -> None:
    """The second list is one lucky run: healthy with the switch off, and with it on again."""
    verdict = diagnosed(batch(model, loss=by_turns(*outcomes)), model, fallbacks=[switch(Block())])
    assert (verdict.cause, verdict.switch, verdict.sample_ids) == ("transient", None, ())
    rate = verdict.evidence["replays"]
    assert 0 < rate["failed"] < rate["of"]
    assert f"fails in {rate['failed']} of {rate['of']} runs" in verdict.message


def test_chance_convicts_nothing_however_often_it_strikes(model: Net) -> None:
    """200 diagnoses at each rate; a wrong verdict is one in a million."""
    for rate in (0.3, 0.6, 0.9):
        draw = random.Random(rate)

        def chance(losses: torch.Tensor, draw: random.Random = draw, rate: float = rate) -> torch.Tensor:
            return losses / 0 if draw.random() < rate else losses

        for _ in range(20):
            failing_batch = batch(model, loss=chance)
            facts = {
                "fallbacks": [switch(Block())],
                "control": batch(model, ids=("c.mp4",), loss=chance),
            }
            assert diagnosed(failing_batch, model, **facts).cause in ("transient", "unknown")


def test_a_place_where_another_sample_fails_too_is_the_step_and_nobodys_sample(model: Net) -> None:
    """The control is healthy in its own step; moved to the place that fails, it fails."""
    failing_batch = batch(model, ids=("c.mp4",), loss=fails)
    control = batch(
        model,
        ids=("c.mp4",),
        moved=lambda other, _draws: failing_batch if other.step < 99 else control,
    )
    verdict = diagnosed(batch(model, ids=("b.mp4",), loss=fails), model, control=control)
    assert (verdict.cause, verdict.sample_ids) == ("step", ())
    assert "any sample fails at this position in the run" in verdict.message


def test_a_sample_that_fails_at_this_place_alone_is_left_out_this_once(model: Net) -> None:
    healthy = batch(model, ids=("b.mp4",))
    failing_batch = batch(
        model,
        ids=("b.mp4",),
        loss=fails,
        moved=lambda other, _: healthy if other.step > 99 else failing_batch,
    )
    verdict = diagnosed(failing_batch, model, control=batch(model, ids=("c.mp4",)))
    assert (verdict.cause, verdict.sample_ids) == ("step", ("b.mp4",))


def test_samples_that_fail_in_company_alone_are_not_to_blame(model: Net) -> None:
    verdict = diagnosed(batch(model, loss=lambda losses: losses / (len(losses) == 1)), model)
    assert (verdict.cause, verdict.sample_ids) == ("step", ())
    assert "each of its samples is healthy by itself" in verdict.message


@pytest.mark.parametrize(("draw_is_bad", "said"), [(True, "fails"), (False, "healthy")])
def test_a_draw_that_fails_is_tried_with_another_sample(model: Net, draw_is_bad: bool, said: str) -> None:
    control = batch(
        model,
        ids=("c.mp4",),
        moved=lambda _, draws: batch(model, ids=("c.mp4",), loss=fails) if draws and draw_is_bad else control,
    )
    healthy = batch(model, ids=("b.mp4",))
    failing_batch = batch(model, ids=("b.mp4",), loss=fails, redrawn=lambda _number: healthy)
    verdict = diagnosed(failing_batch, model, control=control)
    assert (verdict.cause, verdict.sample_ids) == ("inputs", ("b.mp4",))
    assert verdict.evidence["control_with_the_same_draws"] == said


def test_where_every_sample_fails_none_is_named(model: Net) -> None:
    control = batch(model, ids=("c.mp4",), loss=fails)
    verdict = diagnosed(batch(model, ids=("b.mp4",), loss=fails), model, control=control)
    assert (verdict.cause, verdict.sample_ids) == ("unknown", ())
    assert "every sample fails now, also those that were healthy" in verdict.message


def test_a_control_whose_own_draw_fails_is_tried_with_others(model: Net) -> None:
    """A range of timesteps fails, and the control has one of them; one step earlier it did not fail yet."""
    healthy = batch(model, ids=("c.mp4",))
    control = batch(model, ids=("c.mp4",), loss=fails, redrawn=lambda _number: healthy)
    failing_batch = batch(model, ids=("b.mp4",), loss=fails, redrawn=lambda _number: batch(model, ids=("b.mp4",)))
    assert diagnosed(failing_batch, model, control=control).cause == "inputs"


def test_a_control_is_taken_from_the_data_where_no_step_has_given_one(model: Net) -> None:
    tensors = overflows_at_large_values(model)
    requests = []

    def another(wanted: MicroBatch, without: object) -> MicroBatch:
        requests.append((wanted.ids, without))
        return batch(model, ids=("c.mp4",))

    verdict = diagnosed(batch(model, tensors, ("b.mp4",)), model, other_sample=another)
    assert (verdict.cause, verdict.sample_ids) == ("data", ("b.mp4",))
    assert requests == [(("b.mp4",), {"b.mp4"})]


def test_a_replay_that_does_not_fit_into_memory_convicts_nobody(model: Net) -> None:
    out_of_memory = Mock(side_effect=torch.OutOfMemoryError)
    verdict = diagnosed(batch(model, loss=out_of_memory), model)
    assert (verdict.cause, verdict.sample_ids) == ("unknown", IDS)
    assert "does not fit into memory" in verdict.message


def test_frozen_weights_and_buffers_with_other_bits_than_at_the_start_are_named(model: Net) -> None:
    """A flipped sign has the same norm, and two exchanged rows the same sum."""
    model.register_buffer("table", torch.rand(4, 3))
    changes: list[tuple[str, torch.Tensor, Change]] = [
        ("the frozen weight base.weight", model.base.weight.data, torch.neg),
        ("the buffer table", model.table, lambda table: table[[1, 0, 2, 3]]),
        ("the frozen weight base.bias", model.base.bias.data, lambda bias: bias + 1e30),
    ]
    for pattern, values, change in changes:
        record, original = FrozenWeightDigests(model), values.clone()
        assert record.describe_changes() == []
        values.copy_(change(original))
        model.block.fault = fails
        verdict = diagnosed(batch(model), model, frozen_record=record)
        assert (verdict.cause, verdict.sample_ids) == ("weights", ())
        assert verdict.message.startswith(pattern)
        assert verdict.evidence["frozen"]
        values.copy_(original)
        model.block.fault = None
        assert diagnosed(batch(model), model, frozen_record=record).cause == "transient"


def test_one_element_far_beyond_all_others_is_memory_and_no_learning_rate(model: Net) -> None:
    moments = {
        "adapter/up.weight/exp_avg": torch.rand(40, 8),
        "adapter/up.weight/exp_avg_sq": torch.rand(40, 8),
    }
    peaks = {"up.weight": 0.5, "down.weight": 0.5, **dict.fromkeys(moments, 1.0)}
    facts = {"state": moments.items, "peaks": lambda: peaks, "start_peak": 0.5}
    for values, cause in (
        (model.up.weight.data, "weights"),
        (moments["adapter/up.weight/exp_avg"], "optimizer"),
        (moments["adapter/up.weight/exp_avg_sq"], "optimizer"),
    ):
        original = values.clone()
        values.view(-1)[3] = 1e30
        verdict = diagnosed(batch(model), model, **facts)
        assert verdict.cause == cause
        assert f"1 of {values.numel()} elements reach 1e+30" in verdict.message
        values.fill_(1e7)  # all of them: no memory does that
        assert diagnosed(batch(model), model, **facts).cause != cause
        values.copy_(original)
    assert diagnosed(batch(model), model, **facts).cause == "transient"


def test_weight_decay_that_overshoots_is_told_from_the_learning_rate(model: Net) -> None:
    with torch.no_grad():
        model.up.weight[:] = 500.0
    verdict = diagnosed(batch(model), model, start_peak=0.25, decay_share=lambda: 2.5)
    assert (verdict.cause, verdict.evidence["weight_decay"]) == ("optimizer", 2.5)
    assert diagnosed(batch(model), model, start_peak=0.25, decay_share=lambda: 1.5).cause == "learning_rate"


def test_weights_that_are_lost_are_told_before_a_kernel_that_cannot_take_them(model: Net) -> None:
    """Flash attention overflows where PyTorch's others do not."""
    model.block.fault = fails
    flash = switch(model.block, "flash", "attention")
    assert diagnosed(batch(model), model, fallbacks=[flash], start_peak=0.25).switch == flash.name
    with torch.no_grad():
        model.up.weight.mul_(1e6)
    verdict = diagnosed(batch(model), model, fallbacks=[flash], start_peak=0.25)
    assert (verdict.cause, verdict.switch) == ("learning_rate", None)


def test_moments_that_overflow_under_lost_weights_are_the_rates_and_one_alone_is_the_memorys(
    model: Net,
) -> None:
    moments = {"adapter/up.weight/exp_avg_sq": torch.full((6, 2), torch.inf)}
    facts = {"state": moments.items, "start_peak": 0.25}
    assert diagnosed(batch(model), model, **facts).cause == "optimizer"
    with torch.no_grad():
        model.up.weight[0, 0] = 1e30
    assert diagnosed(batch(model), model, **facts).cause == "optimizer"
    with torch.no_grad():
        model.up.weight.fill_(1e6)
        model.down.weight.fill_(1e6)
    verdict = diagnosed(batch(model), model, **facts)
    assert verdict.cause == "learning_rate"
    assert "the learning rate is too high" in verdict.message


def test_a_sample_whose_new_draws_all_fail_is_tried_with_the_controls(model: Net) -> None:
    """A wide range of timesteps fails for every sample: all its draws may lie in it, and the control's do not."""

    def given(with_controls: Change) -> MicroBatch:
        def at(other: MicroBatch, draws: bool) -> MicroBatch:
            should_fail = other.ids == ("c.mp4",) and draws
            return batch(model, ids=("b.mp4",), loss=with_controls if should_fail else fails)

        bad = batch(model, ids=("b.mp4",), loss=fails)
        return batch(model, ids=("b.mp4",), loss=fails, moved=at, redrawn=lambda _number: bad)

    control = batch(model, ids=("c.mp4",), moved=lambda _position, draws: failing if draws else control)
    failing = batch(model, ids=("c.mp4",), loss=fails)
    diagnosis = diagnosed(given(lambda losses: losses), model, control=control)
    assert (diagnosis.cause, diagnosis.evidence["control_with_the_same_draws"]) == (
        "inputs",
        "fails",
    )
    assert diagnosed(given(fails), model, control=control).cause == "data"


def test_what_is_off_is_not_tried_again(model: Net) -> None:
    model.block.fault = fails
    names = ("attention:flash", "attention:flash+math", "kernels", "kernels:norm", "compile")
    switches = [
        replace(
            switch(model.block),
            name=name,
            parent=name.partition(":")[0] if name == "kernels:norm" else None,
        )
        for name in names
    ]

    def tried(*off: str) -> list[str]:
        return [
            candidate.name
            for candidate in DiagnosisContext(model, switches, disabled_names=off).list_enabled_fallbacks()
        ]

    assert tried() == [*names]
    assert tried("attention:flash", "kernels") == ["attention:flash+math", "compile"]
    assert tried("attention:flash", "attention:math", "compile") == ["kernels", "kernels:norm"]
    verdict = diagnosed(batch(model), model, fallbacks=switches, disabled_names=names)
    assert (verdict.cause, verdict.switch) == ("unknown", None)
