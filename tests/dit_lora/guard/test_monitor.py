"""The monitor's numbers against hooks, loops and copies of the test's own."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.recipe import LoraConfig
from dit_lora.families import get_family
from dit_lora.guard.monitor import Monitor

TO_Q = "transformer_blocks.1.attn1.to_q"
LINEAR = "transformer_blocks.0.norm1.linear"


@pytest.fixture
def transformer(tiny_checkpoints: dict[str, Path]) -> nn.Module:
    """A LoRA whose B is not zero, so that every gradient is, and one trainable base weight."""
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel.from_pretrained(
        tiny_checkpoints["cogvideox-2b"], subfolder="transformer"
    ).requires_grad_(False)
    attach_lora(model, LoraConfig(rank=4), get_family("cogvideox").lora_targets, seed=0)
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1, generator=random)
    model.get_submodule(LINEAR).weight.requires_grad_(True)
    return model.train()


@pytest.fixture
def forward(transformer: nn.Module) -> Callable[[], torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 3, 4, 4, 6, generator=random)
    text = torch.randn(2, 226, 32, generator=random)

    def run() -> torch.Tensor:
        return transformer(latents, text, torch.tensor([3, 700]), return_dict=False)[0]

    return run


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def test_peaks_are_those_of_a_hook_of_ones_own(transformer: nn.Module, forward: Callable[[], torch.Tensor]) -> None:
    recorded: dict[str, float] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple, torch.Tensor | tuple], None]:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            recorded[name] = max(tensor.abs().max().item() for tensor in outputs)

        return hook

    for name in (TO_Q, "transformer_blocks.1", "proj_out"):
        transformer.get_submodule(name).register_forward_hook(keep(name))
    monitor = Monitor(transformer, interval_steps=1)
    with monitor.record_outputs():
        forward()
    statistics = monitor.collect_module_statistics()
    assert len(recorded) == 3
    for name, peak in recorded.items():
        assert statistics[name]["abs_max"] == rounded(peak)
        assert statistics[name]["headroom"] == rounded(torch.finfo(torch.float32).max / peak)


@pytest.mark.parametrize(
    ("values", "peak"),
    [((2.0, -5.0), 5.0), ((-5.0, 2.0), 5.0), ((torch.nan, 2.0), torch.nan), ((0.0, 0.0), 0.0)],
)
def test_the_largest_of_several_passes_counts_and_a_nan_is_larger(values: tuple[float, float], peak: float) -> None:
    model = nn.Sequential(nn.Identity())
    monitor = Monitor(model, interval_steps=1)
    with monitor.record_outputs():
        for value in values:
            model(torch.tensor([0.0, value]))
    statistics = monitor.collect_module_statistics()["0"]
    assert statistics["abs_max"] == pytest.approx(peak, nan_ok=True)
    assert ("headroom" in statistics) == (peak > 0)


def test_of_outputs_in_several_dtypes_the_largest_counts_and_the_least_headroom() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
            return x, y.half(), torch.tensor([900_000]), None

    model = nn.Sequential(Several())
    monitor = Monitor(model, interval_steps=1)
    for x, y, peak in (
        (70_000.0, 655.0, 70_000.0),
        (3.0, 655.0, 655.0),
        (3.0, torch.nan, torch.nan),
    ):
        with monitor.record_outputs():
            model[0](torch.tensor([x]), torch.tensor([y]))
        statistics = monitor.collect_module_statistics()["0"]
        assert statistics["abs_max"] == pytest.approx(peak, nan_ok=True)
        assert statistics.get("headroom") == (100.0 if y == 655.0 else None)


def test_norms_of_bf16_gradients_are_fp32() -> None:
    model = nn.Sequential(nn.Linear(30, 50, bias=False)).bfloat16()
    model[0].weight.grad = torch.randn(50, 30).bfloat16()
    monitor = Monitor(model, interval_steps=1)
    monitor.record_gradient_norms()
    exact = model[0].weight.grad.double().norm().item()
    assert monitor.collect_module_statistics()["0"]["grad_norm"] == rounded(exact)


def test_blocks_and_leaves_are_watched_and_a_lora_layer_is_one_of_them(
    transformer: nn.Module, forward: Callable[[], torch.Tensor]
) -> None:
    monitor = Monitor(transformer, interval_steps=1)
    with monitor.record_outputs():
        forward()
    statistics = monitor.collect_module_statistics()
    assert {TO_Q, "transformer_blocks.0", "proj_out", "transformer_blocks.0.ff.net.0"} <= set(statistics)
    assert not any("lora_" in name or "base_layer" in name for name in statistics)
    assert not {"", "transformer_blocks.0.attn1", "transformer_blocks.0.norm1"} & set(statistics)


def test_watching_changes_no_bit_and_leaves_no_hook(
    transformer: nn.Module, forward: Callable[[], torch.Tensor]
) -> None:
    plain = forward()
    with Monitor(transformer, interval_steps=1).record_outputs():
        watched = forward()
    assert torch.equal(plain, watched)
    assert not any(module._forward_hooks for module in transformer.modules())
    with pytest.raises(ZeroDivisionError), Monitor(transformer, interval_steps=1).record_outputs():
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in transformer.modules())


def test_gradient_checkpointing_changes_no_peak(transformer: nn.Module, forward: Callable[[], torch.Tensor]) -> None:
    monitor, collected = Monitor(transformer, interval_steps=1), []
    for _ in range(2):
        with monitor.record_outputs():
            forward().square().mean().backward()
        collected.append(monitor.collect_module_statistics())
        transformer.enable_gradient_checkpointing()
    assert collected[0] == collected[1]


def test_gradient_norms_join_a_and_b_and_are_those_of_a_loop(
    transformer: nn.Module, forward: Callable[[], torch.Tensor]
) -> None:
    forward().square().mean().backward()
    monitor = Monitor(transformer, interval_steps=1)
    monitor.record_gradient_norms()
    statistics = monitor.collect_module_statistics()
    squares: dict[str, float] = {}
    for name, parameter in transformer.named_parameters():
        if parameter.grad is not None:
            module = name.split(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
            square = parameter.grad.double().square().sum().item()
            squares[module] = squares.get(module, 0.0) + square
    assert len(squares) == 9
    assert set(statistics) == set(squares)
    for module, square in squares.items():
        assert statistics[module] == {"grad_norm": pytest.approx(math.sqrt(square), rel=1e-3)}
        assert square > 0


def test_the_update_ratio_is_that_of_saved_copies(transformer: nn.Module, forward: Callable[[], torch.Tensor]) -> None:
    parts = [p for name, p in transformer.named_parameters() if name.startswith(f"{TO_Q}.lora_")]
    before = [p.detach().clone() for p in parts]
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=0.1)
    forward().square().mean().backward()
    monitor = Monitor(transformer, interval_steps=1)
    monitor.before_update()
    optimizer.step()
    monitor.after_update()
    change = torch.cat([(p - old).flatten() for p, old in zip(parts, before, strict=True)]).norm()
    weight = torch.cat([p.flatten() for p in parts]).norm()
    assert len(parts) == 2
    assert monitor.collect_module_statistics()[TO_Q] == {
        "update_ratio": pytest.approx((change / weight).item(), rel=1e-3)
    }


def test_weights_that_stay_zero_have_a_ratio_of_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False))
    nn.init.zeros_(model[0].weight)
    monitor = Monitor(model, interval_steps=1)
    monitor.before_update()
    monitor.after_update()
    assert monitor.collect_module_statistics() == {"0": {"update_ratio": 0.0}}


def test_an_infinity_that_a_clamp_hides_is_named() -> None:
    class Clamp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nan_to_num().clamp(-1, 1)

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), Clamp())
    with torch.no_grad():
        model[1].bias[0] = torch.inf
    monitor = Monitor(model, interval_steps=1)
    with monitor.record_outputs():
        assert model(torch.randn(4, 3)).isfinite().all()
    assert monitor.collect_module_statistics()["1"] == {"abs_max": math.inf, "headroom": 0.0}
    assert monitor.find_hidden_infinities() == ["1"]
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with monitor.record_outputs():
        model(torch.randn(4, 3))
    assert monitor.find_hidden_infinities() == []  # not those of the step before
    assert math.isnan(monitor.collect_module_statistics()["0"]["abs_max"])
    assert monitor.find_hidden_infinities() == ["0", "1"]


def test_headroom_is_of_the_dtype_that_comes_out() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).half()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([-655.0, 3.0]))
    monitor = Monitor(model, interval_steps=1)
    with monitor.record_outputs():
        model(torch.ones(1, 3, dtype=torch.float16))
    assert monitor.collect_module_statistics()["1"] == {"abs_max": 655.0, "headroom": 100.0}


def test_a_step_that_was_given_up_leaves_nothing_to_the_next() -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    monitor = Monitor(model, interval_steps=1)
    with monitor.record_outputs():
        model(torch.full((1, 3), torch.inf))
    with monitor.record_outputs():
        model(torch.ones(1, 3))
    assert math.isfinite(monitor.collect_module_statistics()["0"]["abs_max"])
    assert monitor.collect_module_statistics() == {}


def test_every_nth_step_is_due_and_zero_is_never() -> None:
    model = nn.Linear(2, 2)
    assert [step for step in range(1, 10) if Monitor(model, interval_steps=3).is_due(step)] == [
        3,
        6,
        9,
    ]
    assert not any(Monitor(model, interval_steps=0).is_due(step) for step in range(1, 10))


def test_a_sharded_parameters_norms_are_of_the_whole(tmp_path: Path) -> None:
    """One all-reduce for each kind of norm."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(3, 5, bias=False))
        unsharded = torch.randn(5, 3)
        model[0].weight = nn.Parameter(distribute_tensor(unsharded.clone(), mesh, [Shard(0)]))
        model[0].weight.grad = distribute_tensor(2 * unsharded, mesh, [Shard(0)])
        monitor = Monitor(model, interval_steps=1)
        with CommDebugMode() as communication:
            monitor.record_gradient_norms()
            monitor.before_update()
            with torch.no_grad():
                model[0].weight.mul_(2)
            monitor.after_update()
            statistics = monitor.collect_module_statistics()["0"]
    finally:
        torch.distributed.destroy_process_group()
    assert statistics["grad_norm"] == pytest.approx(2 * unsharded.norm().item(), rel=1e-3)
    assert statistics["update_ratio"] == 0.5
    assert communication.get_total_counts() == 3
