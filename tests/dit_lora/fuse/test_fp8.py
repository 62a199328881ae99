"""`kernels.fp8`: requested or off, refused by name, within the stated bounds on full models, with its own switch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from tiny_steps import TinyStep, tiny_step
from torch import nn

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.fuse import api
from dit_lora.fuse import fp8 as of_fp8
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.guard.comparison.parity import find_first_difference, iter_differences
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks
from dit_lora.numerics.quantized_linear import QuantizedLinear
from dit_lora.planning.search import open_estimator
from dit_lora_kernels import fp8, lora_linear

WITH = {"fp8": "on", "lora_linear": "on"}


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has fp8: its products are those of a CPU."""
    monkeypatch.setattr(api, "why_no_fp8", lambda: None)
    yield
    torch._dynamo.reset()


def step_of(paths: dict[str, Path], variant: str = "cogvideox-5b") -> TinyStep:
    return tiny_step(paths, variant, mixed="bf16")


def apart(found: Any, expected: Any) -> float:
    """The norm of all differences over that of all values."""
    off = sum((found[name].double() - e.double()).square().sum() for name, e in expected.items())
    size = sum(e.double().square().sum() for e in expected.values())
    return float((off / size) ** 0.5)


def has(module: nn.Module) -> bool:
    return "_dit_lora_fp8" in module.__dict__


def kept(model: nn.Module) -> int:
    return sum(map(has, model.modules()))


def test_a_machine_without_it_is_named(tiny_checkpoints: dict[str, Path]) -> None:
    step = step_of(tiny_checkpoints)
    with pytest.raises(DitLoraError, match=r"kernels.fp8: .*8\.9 or more; torch finds no GPU; set"):
        fuse(step.transformer, WITH)
    report = fuse(step.transformer, {"fp8": "auto"}, check=False)
    assert "fp8: off: fp8 products need a GPU" in str(report)
    assert "fp8" not in report.ops
    with pytest.raises(DitLoraError, match="needs lora_linear, which is off"):
        fuse(step.transformer, {"fp8": "on", "lora_linear": "off"})


@pytest.mark.usefixtures("able")
def test_it_is_off_unless_it_is_asked_for(tiny_checkpoints: dict[str, Path]) -> None:
    step = step_of(tiny_checkpoints)
    report = fuse(step.transformer, check=False)
    assert "fp8" not in str(report)
    step.loss()
    assert kept(step.transformer) == 0


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("variant", ["cogvideox-5b", "sana-1.5", "dit-tiny"])
def test_a_model_is_within_what_is_stated(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """Losses and adapter gradients are within the errors that docs/kernels.md states.

    Off, the model is bit-identical.
    """
    step = step_of(tiny_checkpoints, variant)
    fuse(step.transformer, {"lora_linear": "on"}, check=False)
    loss, plain = step.loss(), step.gradients()
    state = {name: tensor.clone() for name, tensor in step.transformer.state_dict().items()}
    report = fuse(step.transformer, WITH, check=False)
    assert "fp8" in report.ops
    grads = step.gradients()
    assert 0 < kept(step.transformer) == sum(op == "fp8" for op, _ in report.fusion.patched_modules)
    fp8_weights = [m.__dict__["_dit_lora_fp8"].weight for m in step.transformer.modules() if has(m)]
    tensors = [tensor for weight in fp8_weights for matrix in weight for tensor in matrix]
    assert of_fp8.count_fp8_bytes(step.transformer) == sum(tensor.nbytes for tensor in tensors)
    exact = tiny_step(tiny_checkpoints, variant).gradients()
    assert apart(plain, exact) < 0.01
    assert 0.02 < apart(grads, exact) < 0.05
    assert step.loss().item() == pytest.approx(loss.item(), rel=0.02)
    with find_fallback(list_model_fallbacks(step.transformer), "fp8").disable_temporarily():
        off = step.gradients()
    assert all(torch.equal(off[name], plain[name]) for name in plain)
    after = step.transformer.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)
    unfuse(step.transformer)
    assert kept(step.transformer) == 0


@pytest.mark.usefixtures("able")
def test_a_weight_that_is_written_to_is_rounded_again(tiny_checkpoints: dict[str, Path]) -> None:
    step = step_of(tiny_checkpoints)
    fuse(step.transformer, WITH, check=False)
    before = step.loss()
    layer: Any = step.transformer.get_submodule("transformer_blocks.0.attn1.to_v")
    with torch.no_grad():
        layer.base_layer.weight.mul_(-1)
    assert not torch.equal(step.loss(), before)
    layer.base_layer.weight = nn.Parameter(-layer.base_layer.weight.data, requires_grad=False)
    assert torch.equal(step.loss(), before)


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("variant", ["cogvideox-5b", "sana-1.5", "dit-tiny"])
def test_a_wrong_one_is_blamed_and_a_right_one_is_not(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    step = step_of(tiny_checkpoints, variant)
    model = step.transformer
    fuse(model, WITH, check=False)
    switches = list_model_fallbacks(model)
    assert switches[0].name == "fp8"  # the first to be tried

    def losses() -> torch.Tensor:
        torch.manual_seed(5)
        return step.losses(model, step.batch).losses

    def compare(switch: Any, others: Any) -> Any:
        return find_first_difference(switch, losses, model, disabled_fallbacks=others)

    assert list(iter_differences(switches, compare)) == []
    product = fp8.multiply_fp8

    def wrong(rows: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        return 2 * product(rows, weight, bias)

    monkeypatch.setattr(lora_linear.fp8, "multiply_fp8", wrong)
    differences_found = iter_differences(switches, compare)
    switch, difference = next(differences_found)
    assert (switch.name, switch.required) == ("fp8", True)
    assert "kernel fp8 differs from its reference at " in difference.message
    switch.disable()
    assert list(differences_found) == []
    assert kept(model) == 0


def test_a_plan_for_a_gpu_counts_it(recipe_values: dict[str, Any]) -> None:
    frozen = []
    for mode in ("off", "on"):
        recipe = parse_recipe(recipe_values | {"kernels": {"fp8": mode}}, "test")
        subject = open_estimator(recipe, is_gpu=True)
        frozen.append(subject.count_weights(recipe).frozen_bytes)
    layers = [m for m in subject.get_meta_model(recipe).modules() if isinstance(m, LoraLayer)]
    shapes = [layer.base_layer.weight.shape for layer in layers]
    assert frozen[1] - frozen[0] == sum(2 * s.numel() + 4 * sum(s) for s in shapes) > 0


@pytest.mark.usefixtures("able")
def test_an_inf_reaches_the_loss(tiny_checkpoints: dict[str, Path]) -> None:
    step = step_of(tiny_checkpoints)
    fuse(step.transformer, WITH, check=False)
    layer: Any = step.transformer.get_submodule("transformer_blocks.0.attn1.to_k")

    def spoil(_module: Any, args: Any) -> Any:
        x = args[0].clone()
        x[0, 3, 5] = torch.inf
        return (x, *args[1:])

    layer.register_forward_pre_hook(spoil)
    assert not torch.isfinite(step.loss())


@pytest.mark.usefixtures("able")
@pytest.mark.thorough
def test_a_block_compiles_whole(tiny_checkpoints: dict[str, Path]) -> None:
    step = step_of(tiny_checkpoints)
    fuse(step.transformer, WITH, check=False)
    expected = step.gradients()
    for block in step.transformer.get_submodule("transformer_blocks").children():
        block.compile(fullgraph=True, backend="aot_eager")
    grads = step.gradients()
    plain = step_of(tiny_checkpoints)
    fuse(plain.transformer, {"lora_linear": "on"}, check=False)
    # The graph has products in fp8, and not the plain ones.
    assert apart(grads, expected) < apart(grads, plain.gradients()) / 3


@pytest.mark.usefixtures("able")
def test_a_quantised_base_is_refused_by_name(tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any]) -> None:
    step = step_of(tiny_checkpoints)
    for layer in [m for m in step.transformer.modules() if isinstance(m, LoraLayer)]:
        layer.base_layer = QuantizedLinear(layer.base_layer, "int8")
    with pytest.raises(DitLoraError, match="its base is a QuantizedLinear, quantised already"):
        fuse(step.transformer, WITH, check=False)
    report = fuse(step.transformer, {"fp8": "auto"}, check=False)
    assert "fp8: not in" in str(report)
    recipe_values["kernels"] = {"fp8": "on"}
    recipe_values["model"]["quantize"] = "int8"
    with pytest.raises(DitLoraError, match=r"kernels.fp8: on: the base is already quantised"):
        parse_recipe(recipe_values, "test")
    del recipe_values["model"]["quantize"]
    recipe_values["train"] |= {"offload": "group", "checkpointing": "full"}
    with pytest.raises(DitLoraError, match=r"kernels.fp8: on: .*train.offload: group is meant to avoid"):
        parse_recipe(recipe_values, "test")


def test_what_does_not_fit_keeps_its_dtype(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "why_no_fp8", lambda: None)
    step = tiny_step(tiny_checkpoints, "cogvideox-5b")  # fp32
    with pytest.raises(DitLoraError, match=r"is torch.float32, \d+ x \d+; bfloat16 and multiples"):
        fuse(step.transformer, WITH, check=False)
