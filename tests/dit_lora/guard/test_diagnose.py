"""Each fault gets its cause, from facts to experiments, with the samples and the module at fault."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from accelerate import PartialState
from diagnoses import (
    IDS,
    TIMESTEPS,
    Block,
    Net,
    batch,
    diagnosed,
    fails,
    overflows_at_large_values,
    rows,
    switch,
)

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.state_checks import (
    compute_weight_peak,
    diagnose_diverged_weights,
    is_unusable_magnitude,
)
from dit_lora.numerics.labels import IGNORE_INDEX


@pytest.fixture
def model() -> Net:
    return Net()


TOKENS = "prompt_embeds has 2 NaN among 24 values, at token 2 of 4 (and 1 more)"
BAD_DATA = [
    ("latents", (1, 4), torch.nan, "latents has 1 NaN among 6 values"),
    ("latents", (1, 0), -torch.inf, "latents has 1 Inf among 6 values"),
    ("latents", (1, 5), -2e4, "latents reaches 2e+04, beyond 10000"),
    ("prompt_embeds", (1, slice(2, 4), 5), torch.nan, TOKENS),
]


@pytest.mark.parametrize(("name", "where", "value", "words"), BAD_DATA)
def test_a_cached_tensor_with_bad_values_is_its_samples_data(
    model: Net, name: str, where: tuple, value: float, words: str
) -> None:
    tensors = rows()
    tensors[name][where] = value
    verdict = diagnosed(batch(model, tensors), model, max_magnitude=1e4)
    assert (verdict.cause, verdict.sample_ids, verdict.message) == ("data", ("b.mp4",), words)
    tensors[name][where] = 0.3
    assert diagnosed(batch(model, tensors), model, max_magnitude=1e4).cause == "transient"


def test_faults_found_when_the_cache_was_read_are_told_in_their_own_words(model: Net) -> None:
    tensors = rows()
    tensors["latents"][0, 1] = torch.nan
    failing_batch = batch(model, tensors, faults={"b.mp4": "its digest is another"})
    verdict = diagnosed(failing_batch, model, kind="bad_data")
    assert (verdict.cause, verdict.sample_ids) == ("data", ("b.mp4", "a.mp4"))
    assert verdict.message == "b.mp4: its digest is another; a.mp4: latents has 1 NaN among 6 values"
    failing_batch = batch(model, tensors, faults={"a.mp4": "its digest is another"})
    assert diagnosed(failing_batch, model).message == "its digest is another"


def test_labels_are_the_cause_where_no_sample_has_one(model: Net) -> None:
    tensors = rows() | {"labels": torch.full((3, 2), IGNORE_INDEX)}
    verdict = diagnosed(batch(model, tensors), model)
    assert (verdict.cause, verdict.sample_ids) == ("labels", IDS)
    assert verdict.message.startswith("a.mp4: all of its 2 labels are -100")
    tensors["labels"][2, 1] = 8
    assert diagnosed(batch(model, tensors), model).cause == "transient"


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bad_weight_with_good_moments_is_the_weights(model: Net, frozen: bool) -> None:
    state = {"optimizer/up.weight/exp_avg": torch.randn(6, 2)}
    with torch.no_grad():
        model.up.weight[4, 1] = torch.inf
        model.base.weight[3, 1] = torch.nan if frozen else 0.2
    verdict = diagnosed(batch(model), model, state=state.items, start_peak=0.4)
    assert (verdict.cause, verdict.sample_ids) == ("weights", ())
    assert verdict.module == ("base" if frozen else "up")
    expected = "frozen weight base.weight has 1 NaN" if frozen else "trained weight up.weight has 1 Inf"
    assert verdict.message.startswith(f"the {expected} among ")
    assert ("frozen" in verdict.evidence) is frozen  # which no snapshot holds


BAD_MOMENTS = [
    ("exp_avg", torch.nan, "has 1 NaN among 12 values"),
    ("exp_avg_sq", torch.inf, "has 1 Inf among 12 values"),
    ("exp_avg_sq", -0.5, "must not be negative and reaches -0.5"),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD_MOMENTS)
def test_a_bad_moment_is_the_optimizer_even_where_it_spoiled_weights(
    model: Net, key: str, value: float, words: str
) -> None:
    state = {f"adapter/up.weight/{moment}": torch.rand(6, 2) for moment in ("exp_avg", "exp_avg_sq")}
    state["adapter/up.weight/exp_avg"].neg_()  # as first moments may be
    assert diagnosed(batch(model), model, state=state.items).cause == "transient"
    state[f"adapter/up.weight/{key}"][2, 1] = value
    verdict = diagnosed(batch(model), model, state=state.items)
    assert (verdict.cause, verdict.module) == ("optimizer", "up")
    assert verdict.message == f"the optimizer's adapter/up.weight/{key} {words}"
    with torch.no_grad():
        model.up.weight[2, 1] = torch.nan
    assert diagnosed(batch(model), model, state=state.items).cause == "optimizer"


@pytest.mark.parametrize("finite", [True, False])
def test_weights_that_grew_a_hundredfold_are_the_learning_rate(model: Net, finite: bool) -> None:
    model.block.fault = fails
    with torch.no_grad():
        model.up.weight[1, 0] = 31.0
        if not finite:
            model.up.weight[2, 0] = torch.nan
    verdict = diagnosed(batch(model), model, start_peak=0.3)
    assert (verdict.cause, verdict.evidence["weight_peak"]) == ("learning_rate", 31)
    assert "trained weights reach 31, from 0.3 at the start" in verdict.message
    assert diagnosed(batch(model), model, start_peak=0.4).cause != "learning_rate"


@pytest.mark.parametrize(
    ("num_bad", "num_infinite", "cause"),
    [
        (13, 1, "learning_rate"),
        (13, 0, "weights"),  # NaN without an overflow comes from elsewhere
        (12, 12, "weights"),
        (2, 2, "weights"),
    ],
)
def test_more_than_half_of_the_elements_bad_with_good_moments_are_the_learning_rate(
    model: Net, num_bad: int, num_infinite: int, cause: str
) -> None:
    values = torch.full((24,), 0.1)
    values[12 - num_bad // 2 :][:num_bad] = torch.nan  # about as many in each of the two tensors
    values[12 - num_bad // 2 :][:num_infinite] = torch.inf
    with torch.no_grad():
        model.down.weight.copy_(values[:12].view(2, 6))
        model.up.weight.copy_(values[12:].view(6, 2))
    verdict = diagnosed(batch(model), model)
    expected = {
        "learning_rate": "2 of 2 trained tensors overflowed in one update, with finite moments: ",
        "weights": "the trained weight down.weight has ",
    }[cause]
    assert (verdict.cause, verdict.message[: len(expected)]) == (cause, expected)


def test_what_is_finite_when_it_is_run_again_is_transient(model: Net) -> None:
    factors = itertools.chain([torch.nan], itertools.repeat(1.0))
    failing_batch = batch(model, loss=lambda losses: losses * next(factors))
    assert not failing_batch.forward().losses.isfinite().any()
    verdict = diagnosed(failing_batch, model)
    assert (verdict.cause, verdict.sample_ids, verdict.module) == ("transient", (), None)


@pytest.mark.parametrize("cause", ["kernel", "attention_backend"])
def test_what_is_finite_without_a_switch_is_its_cause(model: Net, cause: str) -> None:
    model.block.fault = fails
    # The stock model may need more memory for a step than there is.
    out_of_memory_switch = Fallback("norm", "kernel", Mock(side_effect=torch.OutOfMemoryError), Mock(), "")
    idle = [out_of_memory_switch, *(switch(Block(), name, "kernel") for name in ("rope", "gate"))]
    verdict = diagnosed(batch(model), model, fallbacks=[*idle, switch(model.block, cause=cause)])
    assert "does not fit into memory" in str(verdict.evidence["norm"])
    assert (verdict.cause, verdict.switch) == (cause, f"{cause}:norm")
    assert verdict.message == (
        f"finite with {cause}:norm switched off (eager mode in its place); "
        "first inf in the forward: aten.div.Tensor at block"
    )
    assert (verdict.sample_ids, verdict.timesteps) == ((), TIMESTEPS)
    assert (verdict.module, verdict.direction, verdict.dtype) == ("block", "forward", "float32")


def grow(values: torch.Tensor) -> torch.Tensor:
    return values * 3e4 * 3e4 * 1e-8


def test_an_fp16_overflow_is_the_precision() -> None:
    model = Net(torch.float16)
    model.block.fault = grow
    verdict = diagnosed(batch(model), model, fallbacks=[switch(Block())])
    assert (verdict.cause, verdict.module, verdict.dtype) == ("precision", "block", "float16")
    assert "finite in fp32" in verdict.message


def test_fp32_is_not_tried_where_a_second_copy_of_the_weights_does_not_fit() -> None:
    def fault(values: torch.Tensor) -> torch.Tensor:
        if values.dtype is torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grow(values)

    model = Net(torch.float16)
    model.block.fault = fault
    verdict = diagnosed(batch(model), model)
    assert (verdict.cause, model.base.weight.dtype) == ("unknown", torch.float16)
    assert "does not fit" in str(verdict.evidence["fp32"])


@pytest.mark.parametrize(("more", "cause"), [(0, "precision"), (-1, "unknown")])
def test_ranks_in_step_try_fp32_only_where_it_surely_fits(
    monkeypatch: pytest.MonkeyPatch, more: int, cause: str
) -> None:
    """Without memory in the middle of a pass, other ranks would wait for this one."""
    model = Net(torch.float16)
    model.block.fault = grow
    half_parameters = [p for p in model.parameters() if p.dtype is torch.float16]
    available = 4 * sum(p.numel() for p in half_parameters) + more
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    PartialState(cpu=True)
    verdict = diagnosed(batch(model), model, collective_forward=True)
    assert half_parameters
    assert verdict.cause == cause
    assert ("fp32" in verdict.evidence) is (cause == "unknown")


@pytest.mark.parametrize("controlled", [False, True])
def test_a_sample_that_fails_where_others_are_healthy_is_at_fault(model: Net, controlled: bool) -> None:
    """Of a batch of one, only another sample at the same place can tell."""
    tensors, control = overflows_at_large_values(model), batch(model) if controlled else None
    for ids, cause in ((IDS, "data"), (("b.mp4",), "data" if controlled else "unknown")):
        failing_batch = batch(model, tensors, ids)
        verdict = diagnosed(failing_batch, model, fallbacks=[switch(Block())], control=control)
        assert (verdict.cause, verdict.sample_ids) == (cause, ("b.mp4",))
        assert (verdict.timesteps, verdict.op) == ((17,), "aten.exp.default")
        is_in_message = (
            "it fails whichever component is switched off, and other samples are healthy" in verdict.message
        )
        assert is_in_message is (cause == "data")


@pytest.mark.parametrize(("healthy", "cause"), [(0, "inputs"), (2, "inputs"), (3, "data")])
def test_a_sample_that_is_healthy_with_another_draw_is_the_inputs(model: Net, healthy: int, cause: str) -> None:
    """Three draws are tried; the fourth, by its number, is not."""
    tensors = overflows_at_large_values(model)

    def redrawn(number: int) -> MicroBatch:
        return batch(model, rows() if number == healthy else tensors, ("b.mp4",))

    verdict = diagnosed(batch(model, tensors, redrawn=redrawn), model)
    assert (verdict.cause, verdict.sample_ids, verdict.timesteps) == (cause, ("b.mp4",), (17,))


BAD_NOISE = torch.tensor([0.3, torch.nan, -0.2, 0.1, 0.0, 2.0])


def test_bad_noise_for_good_samples_is_the_inputs(model: Net) -> None:
    verdict = diagnosed(batch(model, noise=BAD_NOISE), model, fallbacks=[switch(model.block)])
    assert (verdict.cause, verdict.sample_ids, verdict.timesteps) == ("inputs", IDS, TIMESTEPS)
    assert "argument 0 has 3 NaN among 18 values" in verdict.message


def test_bad_noise_is_the_inputs_though_a_module_hid_an_infinity_of_its_own(model: Net) -> None:
    model.mask = Block()
    model.mask.fault = lambda values: values.log().clamp(-1, 0)
    model.block.fault = lambda values: values + model.mask(torch.eye(6))[2]
    assert diagnosed(batch(model, noise=BAD_NOISE), model).cause == "inputs"


def test_what_nothing_cures_is_unknown_and_all_samples_are_named(model: Net) -> None:
    model.block.fault = fails
    facts = {"fallbacks": [switch(Block())], "control": batch(model), "kind": "non_finite_gradient"}
    verdict = diagnosed(batch(model), model, **facts)
    assert (verdict.cause, verdict.sample_ids, verdict.switch) == ("unknown", IDS, None)
    assert (verdict.module, verdict.timesteps) == ("block", TIMESTEPS)
    assert "switching components off does not make it healthy" in verdict.message
    assert verdict.evidence["losses"] == ["inf"] * 3
    assert {*verdict.evidence["bad_gradients"]} == {"down.weight", "up.weight"}


def test_a_loss_that_fails_by_itself_is_told_to_be_outside_the_model(model: Net) -> None:
    verdict = diagnosed(batch(model, loss=fails), model)
    assert (verdict.cause, verdict.module) == ("unknown", "")
    assert verdict.message.endswith("aten.div.Tensor outside the model, in the loss")


def test_an_op_of_the_model_itself_is_not_told_to_be_in_the_loss(model: Net) -> None:
    model.register_forward_hook(lambda _module, _args, output: output / 0)
    assert "in the loss" not in diagnosed(batch(model), model).message


def test_a_gradient_of_zero_is_cured_by_its_switch_or_else_is_nobodys_sample(model: Net) -> None:
    model.block.fault = torch.Tensor.detach
    switches = [switch(Block(), "gate"), switch(model.block)]
    verdict = diagnosed(batch(model), model, kind="zero_gradient", fallbacks=switches)
    assert (verdict.cause, verdict.switch) == ("kernel", "kernel:norm")
    assert diagnosed(batch(model), model, fallbacks=switches).cause == "transient"
    verdict = diagnosed(batch(model), model, kind="zero_gradient")
    assert (verdict.cause, verdict.sample_ids, verdict.module) == ("unknown", (), None)


def test_facts_come_before_experiments_and_the_smaller_change_before_the_larger() -> None:
    """Faults are removed one by one; the remaining ones are found."""
    model, tensors = Net(torch.float16), rows()
    model.block.fault = grow
    moment = torch.full((6, 2), torch.nan)
    facts = {"state": {"adapter/up.weight/exp_avg": moment}.items, "start_peak": 0.5}
    bad: list[tuple[str, torch.Tensor, float]] = [
        ("data", tensors["latents"][1], torch.nan),
        ("labels", tensors["labels"], IGNORE_INDEX),
        ("weights", model.base.bias.data, torch.inf),
        ("optimizer", moment, torch.nan),
        ("weights", model.up.weight.data[0], torch.nan),
    ]
    for _, values, value in bad:
        values.fill_(value)
    for cause, values, _ in bad:
        verdict = diagnosed(batch(model, tensors), model, fallbacks=[switch(model.block)], **facts)
        assert verdict.cause == cause
        values.fill_(0.2 if values.is_floating_point() else 3)
    assert diagnosed(batch(model), model, fallbacks=[switch(model.block)]).cause == "kernel"
    assert diagnosed(batch(model), model).cause == "precision"


def test_weights_that_ran_away_are_the_learning_rate(model: Net) -> None:
    """Also where the step itself is healthy when it is run again."""
    with torch.no_grad():
        model.base.weight[0, 0] = 1e9
        model.up.weight[:] = 500.0 + torch.rand(6, 2)
    assert diagnosed(batch(model), model, start_peak=0.25).cause == "learning_rate"
    assert diagnosed(batch(model), model, start_peak=0.6).cause == "transient"
    # Of weights that began at zero: beyond what any adapter reaches.
    assert diagnosed(batch(model), model, start_peak=0.0).cause == "learning_rate"
    with torch.no_grad():
        model.down.weight[0, 0] = torch.nan
        model.up.weight[:] = 500.0
    verdict = diagnose_diverged_weights(batch(model), DiagnosisContext(model, start_peak=0.25))
    assert (verdict.cause, verdict.step, verdict.rank) == ("learning_rate", 12, 2)
    assert "trained weights reach 500, from 0.25 at the start" in verdict.message


def test_weights_are_lost_by_their_largest_magnitude_and_by_what_they_started_at() -> None:
    weights = [torch.tensor([0.3, -7.5]), torch.tensor([[2.0], [torch.inf]]), torch.empty(0)]
    assert compute_weight_peak(weights) == torch.inf
    assert compute_weight_peak(weights, finite_only=True) == 7.5
    assert compute_weight_peak(iter([torch.tensor([3, 4])])) == 0.0
    losses = [(99.0, 0.01), (101.0, 0.1), (900.0, 1.0), (1100.0, 1.0)]
    assert [is_unusable_magnitude(peak, start) for peak, start in losses] == [
        False,
        True,
        False,
        True,
    ]
