"""Slopes of a small net's loss against gradients that are right, wrong or missing."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.guard.gradient_check import check, directions, slopes
from dit_lora.guard.gradient_check.check import GradientReport, check_gradient
from dit_lora.guard.gradient_check.directions import (
    Direction,
    GradientDirection,
    RandomDirection,
    TensorwiseGradientDirection,
    displace_weights,
    round_to_spacing,
    select_exact_parameters,
)
from dit_lora.guard.gradient_check.slopes import (
    TOLERANCES,
    CheckResult,
    LossEvaluator,
    SlopeComparison,
    SlopeEstimate,
    compare_gradient_with_slopes,
    conclude_from_estimates,
    divide_or_infinity,
)
from dit_lora.numerics.stop_gradient import stop_gradient

LAYERS = ("0", "3", "5")


@dataclass
class SmallStep:
    """A step of a net with dropout on five samples; `detach` cuts the gradient off before a layer."""

    model: nn.Sequential
    dtype: torch.dtype = torch.float32
    detach: str = ""
    extra_noise: float = 0.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        weight = self.parameters["0.weight"]
        self.x = torch.randn(5, 7, generator=generator).to(weight.dtype)
        self.y = torch.randn(5, 4, generator=generator)
        for name, layer in self.model.named_children():
            layer.register_forward_pre_hook(lambda _, args, name=name: self._cut(name, args[0]))

    def _cut(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x.detach() if name == self.detach else x

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def compute_terms(self) -> torch.Tensor:
        is_low_precision = self.parameters["0.weight"].dtype == torch.float32 and self.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16) if is_low_precision else nullcontext():
            output = self.model(self.x)
        losses = (output.to(self.parameters["0.weight"].dtype) - self.y).square()
        terms = losses.mean(1) / len(self.x)
        if not torch.is_grad_enabled() and self.extra_noise:
            # Of another generator, as atomic additions of a GPU.
            terms = terms + self.extra_noise * self.noise()
        return terms

    def noise(self) -> torch.Tensor:
        self._generator = getattr(self, "_generator", torch.Generator().manual_seed(9))
        return torch.randn(len(self.x), generator=self._generator)

    def run_backward(self) -> None:
        self.model.zero_grad()
        # The dropout masks of the check: it restores this state.
        with torch.random.fork_rng([]):
            self.compute_terms().sum().backward()

    def scale_gradients(self, factor: float, names: Iterable[str] = ()) -> None:
        for name in names or self.parameters:
            gradient = self.parameters[name].grad
            assert gradient is not None
            gradient.mul_(factor)

    def check(self, **options: Any) -> GradientReport:
        return check_gradient(self.compute_terms, self.parameters, dtype=self.dtype, **options)


def small_step(dtype: torch.dtype = torch.float32, *, weights: torch.dtype | None = None, **options: Any) -> SmallStep:
    torch.manual_seed(5)
    layers = [nn.Linear(7, 48), nn.Dropout(0.2), nn.Tanh(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4)]
    model = nn.Sequential(*layers).to(weights or (torch.float64 if dtype == torch.float64 else torch.float32))
    step = SmallStep(model, dtype, **options)
    step.y = step.y.to(torch.float64) if dtype == torch.float64 else step.y
    step.run_backward()
    return step


DIRECTIONS: list[Callable[[dict[str, torch.Tensor]], Direction]] = [
    GradientDirection,
    TensorwiseGradientDirection,
    lambda parameters: RandomDirection.from_parameters(parameters, seed=4),
]


@pytest.mark.parametrize("make_direction", DIRECTIONS)
def test_the_slope_is_autograds_in_fp64(make_direction: Callable[[dict[str, torch.Tensor]], Direction]) -> None:
    step = small_step(torch.float64)
    evaluator = LossEvaluator(step.compute_terms, [], 100)
    evaluator.evaluate_base()
    direction = make_direction(step.parameters)
    comparison = compare_gradient_with_slopes(evaluator, direction, size=1e-3, dtype=torch.float64)
    assert comparison.result == "agrees"
    assert abs(comparison.ratio - 1) < min(1e-6, comparison.bound)
    # Steps are rounded by 2^-53 of the weights only.
    estimate = comparison.estimate
    assert estimate is not None
    assert estimate.projection == pytest.approx(estimate.size * direction.compute_slope(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_scaled_gradient_differs_by_its_factor(dtype: torch.dtype, factor: float) -> None:
    step = small_step(dtype)
    step.scale_gradients(factor)
    report = step.check()
    # In bf16, an error of 5 % would not be seen.
    healthy_result = "agrees" if dtype == torch.float32 else "cannot tell"
    assert report.result == (healthy_result if factor == 1 else "differs")
    assert report.worst is not None
    assert factor != 1 or report.worst.result == "agrees"
    assert abs(report.worst.ratio - 1 / factor) < report.worst.bound / factor < 0.3
    assert report.num_evaluations >= 2 + sum(c.num_evaluations for c in report.comparisons)
    if factor != 1:
        # Of all layers: the last one, and those before it.
        assert report.location is not None
        assert (report.location.layer, report.location.earlier_layers) == ("5", "differs")


@pytest.mark.parametrize(("bend", "factor", "result"), [(1e-6, 1.0, "cannot tell"), (1e9, 2.0, "differs")])
def test_a_bend_within_a_thousandth_of_a_step_is_no_fault(
    bend: float, factor: float, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of ReLUs has such bends; what differs before it looks as closely is not reported."""
    # Bends of other elements look like noise, so that the first confirmation does not look closely.
    monkeypatch.setattr(slopes, "_persists_at_small_step", lambda *_args: True)
    weight = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    start = weight.detach().clone()
    inputs = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def compute_terms() -> torch.Tensor:
        moved = inputs @ (weight - start)
        return 1 + inputs @ weight / 50 + bend * torch.tanh(moved / bend) / 5

    compute_terms().sum().backward()
    assert weight.grad is not None
    weight.grad.mul_(factor)
    assert check_gradient(compute_terms, {"0.weight": weight}, dtype=torch.float64).result == result


def test_steps_that_products_in_tf32_would_hide_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    for allow_matmul, allow_conv in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=allow_matmul))
        monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=allow_conv))
        assert slopes.may_use_tf32([torch.ones(1), on_gpu]) is (allow_matmul or allow_conv)
        assert not slopes.may_use_tf32([torch.ones(1)])
    monkeypatch.undo()
    # As if the small model's weights were on a GPU.
    step = small_step(torch.float32)
    step.scale_gradients(2)
    in_fp32 = step.check()
    monkeypatch.setattr(check, "persists_at_smallest_step", None)
    for module in (check, slopes):
        monkeypatch.setattr(module, "may_use_tf32", lambda _parameters: True)
    in_tf32 = step.check()
    assert in_tf32.location is not None
    assert (in_tf32.result, in_tf32.location.layer) == ("differs", "5")
    assert in_fp32.worst is not None
    assert in_tf32.worst is not None
    assert in_tf32.worst.bound > 3 * in_fp32.worst.bound


@pytest.mark.parametrize(("stop", "result"), [(stop_gradient, "agrees"), (torch.Tensor.detach, "differs")])
def test_a_constant_computed_from_the_output_keeps_its_value(
    stop: Callable[[torch.Tensor], torch.Tensor], result: str
) -> None:
    layer = nn.Linear(7, 4)
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))

    def compute_terms() -> torch.Tensor:
        output = layer(x)
        return (output * (1 + stop(output).square())).mean(1)

    compute_terms().sum().backward()
    report = check_gradient(compute_terms, dict(layer.named_parameters()))
    assert report.result == result


def test_noise_that_hides_the_slope_allows_no_result() -> None:
    quiet, noisy = small_step(extra_noise=1e-6), small_step(extra_noise=0.3)
    assert quiet.check().result == "agrees"
    noisy.scale_gradients(0.9, ["3.weight"])
    report = noisy.check()
    assert report.result == "cannot tell"
    assert all(comparison.result == "cannot tell" for comparison in report.comparisons)


def test_weights_stored_in_bf16_are_moved_by_whole_spacings() -> None:
    step = small_step(torch.bfloat16, weights=torch.bfloat16)
    assert {c.result for c in step.check().comparisons if c.direction.startswith("gradient")} == {"agrees"}
    step.scale_gradients(0.5)
    assert step.check().result == "differs"


def make_estimate(size: float, difference: float, noise: float = 1e-5) -> SlopeEstimate:
    """An estimate whose slope, per length, differs by so much from the gradient's, 1."""
    return SlopeEstimate(
        size=size,
        slope=size * (1 + difference),
        projection=size,
        noise=noise,
        truncation=1e-5 * size,
        gradient_error=1e-4 * size,
        scale=size,
        moves_loss=True,
        num_values=20,
    )


@pytest.mark.parametrize(
    ("sizes", "differences", "result"),
    [
        # As of Sana's ReLU: the difference is in proportion to the size, and larger steps saturate.
        ([2.5, 6.0], [0.006, 0.008], "cannot tell"),
        ([1.0, 2.5], [0.0024, 0.006], "cannot tell"),
        ([1.0, 2.5], [0.006, 0.006], "differs"),
    ],
)
def test_a_smaller_step_must_confirm_a_difference(sizes: list[float], differences: list[float], result: str) -> None:
    # The first is the best that differs if it is the only size below the second.
    noises = [1e-4, 1e-4] if sizes[0] == 1.0 else [1e-4, 4e-4]
    estimates = [make_estimate(*values) for values in zip(sizes, differences, noises, strict=True)]
    assert conclude_from_estimates(estimates, TOLERANCES[torch.float32]) == result


def test_a_check_that_cannot_tell_gives_the_comparison_that_could_not() -> None:
    def compare(direction: str, result: CheckResult, noise: float) -> SlopeComparison:
        return SlopeComparison(direction, ("a",), result, 4, make_estimate(1.0, 0.0, noise))

    along, tensorwise = compare("gradient", "agrees", 1e-5), compare("gradient per tensor", "cannot tell", 1e-3)
    signs, nothing = compare("random signs", "cannot tell", 1.0), SlopeComparison("gradient", ("a",), "cannot tell", 0)
    assert GradientReport("cannot tell", (along, tensorwise, signs), 12).worst is tensorwise
    assert GradientReport("cannot tell", (along, signs), 8).worst is along
    assert GradientReport("cannot tell", (nothing,), 0).worst is None


def test_large_tensors_are_moved_in_parts_and_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions, "_MAX_ELEMENTS", 5)
    weights = {"a": torch.randn(7, 3), "b": torch.randn(4, 8), "c": torch.tensor(2.0), "d": torch.zeros(0, 3)}
    originals = {name: weight.clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape)
    for direction in (TensorwiseGradientDirection(weights), RandomDirection.from_parameters(weights, 0)):
        with displace_weights(direction, 0.01, torch.float32) as displacement:
            predicted = displacement.move_weights_to_position(2)
            moved = {name: weight - originals[name] for name, weight in weights.items()}
            step_square = 0.0
            for name, weight in weights.items():
                assert weight.grad is not None
                step_square += (weight.grad * moved[name] / 2).square().sum().item()
            assert displacement.compute_random_projection() == pytest.approx(step_square**0.5, rel=1e-3)
        assert predicted == pytest.approx(0.02 * direction.compute_slope(), rel=1e-3)
        assert all(bool(moved[name].all()) for name in weights)
        assert all(torch.equal(weights[name], originals[name]) for name in weights)


def test_a_step_is_rounded_without_bias() -> None:
    weight = torch.full((20_000,), 1.5)
    # A tenth of the spacing of bf16 at 1.5 to 1.52, which is 2^-7.
    step = torch.full_like(weight, 0.1 * 2**-7)
    rounded = round_to_spacing(step, weight, torch.bfloat16, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {0.0, 2**-7}
    assert rounded.mean().item() == pytest.approx(0.1 * 2**-7, rel=0.1)
    moved = (weight + rounded).bfloat16().float() - (weight - rounded).bfloat16().float()
    assert torch.equal(moved, 2 * rounded)
    fine_step = round_to_spacing(step, weight, torch.float32, torch.Generator().manual_seed(0))
    assert (fine_step - step).abs().max() <= 2**-23


@pytest.mark.parametrize("missing", [None, torch.zeros])
def test_a_missing_gradient_is_named(missing: Callable[[torch.Size], torch.Tensor] | None) -> None:
    step = small_step()
    parameter = step.parameters["3.weight"]
    parameter.grad = missing(parameter.shape) if missing else None
    report = step.check()
    assert report.result == "differs"
    assert report.worst is not None
    assert (report.worst.direction, report.worst.parameters) == ("random signs, zero gradients", ("3.weight",))
    assert report.worst.bound == report.worst.ratio * report.worst.ratio == float("inf")
    assert report.location is not None
    assert (report.location.layer, report.location.candidates) == ("3", ("3",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_detached_inputs_are_located_before_the_layer(dtype: torch.dtype) -> None:
    """The layers before have no gradient; the layer itself has the right one."""
    report = small_step(dtype, detach="5").check()
    assert report.result == "differs"
    assert report.location is not None
    assert (report.location.layer, report.location.earlier_layers) == ("3", "differs")


def test_the_parameter_group_is_named() -> None:
    step = small_step()
    step.scale_gradients(1.3, ["3.weight"])
    groups = {layer: [f"{layer}.weight", f"{layer}.bias"] for layer in LAYERS}
    report = step.check(groups=groups)
    assert report.location is not None
    assert (report.location.groups, report.location.layer) == (("3",), "3")
    whole = step.check(groups={"all": list(step.parameters)})
    assert whole.location is not None
    assert (whole.location.groups, whole.location.layer, whole.location.earlier_layers) == ((), "3", "agrees")


def test_weights_without_effect_may_have_no_gradient() -> None:
    """LoRA's A before the first step, where B is zero."""
    step = small_step()
    with torch.no_grad():
        for name in ("5.weight", "3.bias"):
            step.parameters[name].zero_()
    step.run_backward()
    gradient = step.parameters["3.weight"].grad
    assert gradient is not None
    assert not gradient.any()
    assert step.check().result == "agrees"


class PlantedError(Exception):
    pass


def test_weights_and_random_state_are_restored_even_after_an_error() -> None:
    step = small_step(torch.bfloat16)
    step.parameters["3.bias"].grad = None
    weights = {name: p.detach().clone() for name, p in step.parameters.items()}
    gradients = {name: p.grad for name, p in step.parameters.items()}
    state = torch.get_rng_state()
    assert step.check().result == "differs"
    calls = iter(range(9))

    def fail() -> torch.Tensor:
        if next(calls, None) is None:
            raise PlantedError
        return step.compute_terms()

    with pytest.raises(PlantedError):
        check_gradient(fail, step.parameters)
    assert all(torch.equal(p, weights[name]) for name, p in step.parameters.items())
    assert all(p.grad is gradients[name] for name, p in step.parameters.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_autocasts_cache_neither_hides_steps_nor_loses_the_next_gradient() -> None:
    step = small_step(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert step.check().comparisons[0].result == "agrees"
        step.run_backward()
    assert all(p.grad is not None and p.grad.any() for p in step.parameters.values())


def test_what_cannot_be_compared_says_why() -> None:
    step = small_step()
    with torch.random.fork_rng([]):
        loss = step.compute_terms().sum().item()
    assert "was 2 in the step" in step.check(step_loss=2.0).reason
    assert step.check(step_loss=loss).reason == ""
    step.scale_gradients(float("nan"), ["3.bias"])
    assert step.check().reason == "the gradient is not finite"
    step.y[2, 2] = float("inf")
    report = step.check()
    assert (report.result, report.reason, report.worst) == ("cannot tell", "the loss is not finite", None)


def test_the_budget_of_evaluations_is_kept() -> None:
    step = small_step()
    step.scale_gradients(2, ["3.weight"])
    assert step.check(max_evaluations=5).result == "cannot tell"
    # Enough to find a difference, and too few to follow it down to the rounding.
    for max_evaluations, result in ((18, "cannot tell"), (100, "differs")):
        report = step.check(max_evaluations=max_evaluations)
        assert report.result == result
        assert report.num_evaluations <= max_evaluations


def test_division_by_zero_keeps_the_sign() -> None:
    assert divide_or_infinity(-1, 0) == -float("inf")
    assert divide_or_infinity(0, 0) != divide_or_infinity(0, 0)


def test_only_the_magnitudes_of_dora_layers_are_checked() -> None:
    names = ["a.lora_A.default.weight", "a.lora_B.default.weight", "a.lora_magnitude_vector.default.weight"]
    others = ["b.lora_A.default.weight", "b.lora_B.default.weight", "head.weight"]
    parameters = {name: torch.ones(1) for name in [*names, *others]}
    assert list(select_exact_parameters(parameters)) == [names[-1], *others]


def test_a_graph_from_before_a_check_can_be_differentiated_after_it() -> None:
    step = small_step()
    # With the dropout masks of the gradient.
    with torch.random.fork_rng([]):
        loss = step.compute_terms().sum()
    assert step.check().result == "agrees"
    # Autograd would refuse weights that were written to.
    loss.backward()
