"""Compiled blocks with fused ops: they train as fused eager ones, in whole graphs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fuse_checks import by, fuse_all
from tiny_steps import TinyStep, tiny_step
from torch._dynamo.utils import counters

from dit_lora.config.load import parse_recipe
from dit_lora.training.execution import compiled
from dit_lora.training.execution.compiled import compile_blocks

FAMILIES = ("cogvideox-5b", "sana-1.5", "dit-tiny")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced graphs are dropped before and after; ops run their references, since the traced graph is the same."""
    torch._dynamo.reset()
    counters.clear()
    with by("reference", monkeypatch):
        yield
    torch._dynamo.reset()
    counters.clear()


def fused_step(paths: dict[str, Path], variant: str, mixed: str = "no") -> TinyStep:
    """A step of a fused model; a mask leaves out the second sample's last tokens."""
    step = tiny_step(paths, variant, mixed=mixed, dropout=0.1)
    fuse_all(step.transformer)
    for name, tensor in step.batch.items():
        if "mask" in name:
            tensor[1, -2:] = 0
    return step


def trained(step: TinyStep, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some optimizer steps on one batch, and what they made of the adapter."""
    parameters = {n: p for n, p in step.transformer.named_parameters() if p.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW([*parameters.values()], lr=2e-3)
    losses = []
    for _ in range(steps):
        for micro_step in range(2):  # gradients add up
            loss = step.loss() / (1 + micro_step)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    after = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
    return losses, after


def compile_whole(
    step: TinyStep, recipe_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    recipe_values["train"] |= {"compile": True}
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = parse_recipe(recipe_values, "test")
    compile_blocks(recipe, step.transformer, Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("variant", "mixed"),
    [
        ("cogvideox-5b", "no"),
        ("dit-tiny", "bf16"),
        *(pytest.param(variant, "no", marks=pytest.mark.thorough) for variant in FAMILIES[1:]),
        *(pytest.param(variant, "bf16", marks=pytest.mark.thorough) for variant in FAMILIES[:2]),
    ],
)
def test_a_fused_model_trains_compiled_as_it_does_eager(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: str,
    mixed: str,
) -> None:
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    step = fused_step(tiny_checkpoints, variant, mixed)
    losses, weights = trained(step, 3)
    compile_whole(step, recipe_values, monkeypatch, tmp_path)
    results, moved = trained(step, 3)
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] >= 1
    assert losses[-1] < losses[1]
    tolerance = 1e-4 if mixed == "no" else 2e-2
    assert results == pytest.approx(losses, rel=tolerance)
    if mixed == "no":
        assert all(torch.allclose(moved[n], weights[n], rtol=1e-3, atol=1e-4) for n in weights)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", FAMILIES)
def test_inductor_trains_it_too(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variant: str,
) -> None:
    step = fused_step(tiny_checkpoints, variant)
    losses, weights = trained(step, 2)
    compile_whole(step, recipe_values, monkeypatch, tmp_path)
    results, moved = trained(step, 2)
    assert not counters["graph_break"], counters["graph_break"]
    assert results == pytest.approx(losses, rel=1e-3)
    assert all(torch.allclose(moved[n], weights[n], rtol=1e-2, atol=1e-3) for n in weights)
