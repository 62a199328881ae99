"""A preflight, statistics and spikes in loops that are not ours."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from dit_lora.errors import DitLoraError
from dit_lora.guard import Guard, LoopConfig, RecoveryConfig
from dit_lora.guard.attach import monitoring
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attention_backends import AttentionCall, BackendParity
from dit_lora.guard.fallbacks import preserve_attention_backends


class Attending(nn.Module):
    """Two layers around an attention, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.leave = nn.Linear(8, 6)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.enter(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        return self.leave(mixed.transpose(1, 2).flatten(-2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(step))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(config: LoopConfig | None, folder: Path, steps: int = 5) -> tuple[nn.Module, Any]:
    """Train two layers by two optimizers, with a clip; return the model and what step 4 was made of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.AdamW(model[2].parameters(), lr=0.01),
    ]
    guard = Guard.watch(model, optimizers, folder=folder, config=config) if config else None
    recorded: dict[str, Any] = {}
    for step in range(1, steps + 1):
        x = batch(step)
        hidden = model[0](x)
        loss = 3 * (model(x) - x).square().mean()
        loss.backward()
        if step == 4:
            recorded = {"hidden": hidden.detach(), "weight": model[2].weight.detach().clone()}
            recorded["grads"] = [p.grad.clone() for p in model[0].parameters() if p.grad is not None]
        if guard:
            guard.before_clipping()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 4:
            recorded["changed"] = model[2].weight.detach() - recorded["weight"]
            recorded["after"] = model[2].weight.detach().clone(), model[2].bias.detach().clone()
            recorded["bias"] = None
    if guard:
        guard.detach()
    return model, recorded


def test_statistics_are_those_of_the_whole_step(tmp_path: Path) -> None:
    _, recorded = trained(LoopConfig(monitor_every=2), tmp_path)
    second, fourth = lines(tmp_path / monitoring.STATISTICS_FILE)
    assert (second["step"], fourth["step"]) == (2, 4)
    first_layer, last_layer = fourth["modules"]["0"], fourth["modules"]["2"]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in recorded["grads"]))
    assert first_layer["grad_norm"] == pytest.approx(norm, rel=1e-3)  # before the clip
    assert first_layer["abs_max"] == pytest.approx(float(recorded["hidden"].abs().max()), rel=1e-3)
    # The second optimizer's layer too, which steps after the first has ended the step.
    change = float(recorded["changed"].double().norm())
    assert last_layer["update_ratio"] * float(recorded["after"][0].double().norm()) == pytest.approx(change, rel=0.2)


def test_a_loop_that_is_looked_at_trains_bit_for_bit_the_same(tmp_path: Path) -> None:
    config = LoopConfig(monitor_every=1, spike_threshold=8, preflight=True)
    looked, _ = trained(config, tmp_path)
    unguarded, _ = trained(None, tmp_path)
    for looked_weight, unguarded_weight in zip(looked.parameters(), unguarded.parameters(), strict=True):
        assert torch.equal(looked_weight, unguarded_weight)
    assert len(lines(tmp_path / monitoring.STATISTICS_FILE)) == 5
    assert not lines(tmp_path / "events.jsonl")


def test_a_spike_is_reported_and_a_step_that_trips_is_none(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    bare = nn.Linear(6, 6)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=1e-4))
    config = LoopConfig(spike_threshold=8, spike_window=30)
    guard = Guard.attach(accelerator, model, optimizer, folder=tmp_path, config=config)
    for step in range(1, 31):
        x = batch(step)
        x[1] = math.nan if step == 24 else x[1]
        loss = model(x).square().mean() * (1e4 if step == 27 else 1)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    guard.detach()
    events = lines(tmp_path / "events.jsonl")
    reported = [(event["step"], event["kind"], event["action"]) for event in events]
    assert reported == [(24, "non_finite_loss", "skip"), *[(27, "spike", "report")] * 2]
    metrics = [event["verdict"]["words"].split(" ")[0] for event in events[1:]]
    assert metrics == ["loss", "grad_norm"]
    assert {event["guard"] for event in events} == {guard._file.id}


def test_an_output_that_the_loop_hides_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.watch(model, optimizer, folder=tmp_path, config=LoopConfig(monitor_every=1))
    with torch.no_grad():
        frozen = model[0].requires_grad_(False)
        frozen.weight[1] = 3e38
    model(batch(1) * 10).nan_to_num(0.0, 1.0, -1.0).square().mean().backward()
    model[1].weight.grad = torch.ones(6, 8)
    optimizer.step()
    guard.detach()
    (event,) = lines(tmp_path / "events.jsonl")
    assert event["kind"] == "hidden_infinity"
    assert "the output of 0" in event["verdict"]["words"]


def wrong_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def parity(call: AttentionCall, name: str) -> BackendParity:
        error = 0.5 if name == "flash" else 0.0
        if name not in ("flash", "math"):
            return BackendParity(call, name, False, "no GPU", {})
        return BackendParity(call, name, True, "", {"out": error})

    monkeypatch.setattr("dit_lora.guard.checks.measure_backend_parity", parity)


def test_the_preflight_switches_off_a_wrong_backend_and_names_what_never_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_flash(monkeypatch)
    torch.manual_seed(0)
    model = Attending()
    model.register_parameter("stale", nn.Parameter(torch.full((2, 2), math.nan), False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with preserve_attention_backends(), caplog.at_level("WARNING", "dit_lora"):
        guard = Guard.watch(model, optimizer, folder=tmp_path, config=LoopConfig(preflight=True))
        for step in range(1, 4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        assert not torch.backends.cuda.flash_sdp_enabled()
        guard.detach()
    reported = [(e["step"], e["kind"], e["action"], e["verdict"]) for e in guard.events]
    assert [entry[:3] for entry in reported] == [
        *[(1, "preflight", "report")] * 3,
        (1, "preflight", "fallback"),
    ]
    base, unreached, attention, switched_off_message = (entry[3]["words"] for entry in reported)
    assert "stale has 4 NaN" in base
    assert "unused.weight: no gradient" in unreached
    assert "enter" not in unreached
    assert "flash" in attention
    assert "q 3x2x5x4" in attention
    assert switched_off_message.startswith("attention:flash differs from fp64")
    assert json.loads((tmp_path / "guard.json").read_text())["starts"][0]["switched_off"] == ["attention:flash"]
    assert "checks at the first healthy step" in caplog.text


def test_a_first_step_that_trips_is_not_judged_by_the_preflight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard.watch(model, optimizer, folder=tmp_path, config=LoopConfig(preflight=True))
    with caplog.at_level("WARNING", "dit_lora"):
        for step in range(1, 4):
            optimizer.zero_grad()
            x = batch(step)
            x[0] = math.nan if step == 1 else x[0]
            model(x).square().mean().backward()
            optimizer.step()
            assert ("checks at the first" in caplog.text) is (step > 1)
    guard.detach()
    assert [event["kind"] for event in guard.events] == ["non_finite_loss"]
    assert caplog.text.count("checks at the first") == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"monitor_every": -1}, "monitor_every=-1: it must be a whole number"),
        ({"spike_threshold": 0.0}, "spike_threshold=0.0: it must be above 0"),
        ({"spike_window": 19}, "spike_window=19: it must be a whole number of 20"),
        ({"max_skips": -2, "spike_window": 3}, "max_skips=-2"),
    ],
)
def test_settings_out_of_bounds_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(DitLoraError, match="LoopConfig: ") as refused:
        LoopConfig(**wrong)
    assert words in str(refused.value)


def test_what_a_loop_is_not_able_to_look_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DitLoraError, match="needs folder="):
        Guard.watch(model, optimizer, config=LoopConfig(monitor_every=5))
    monkeypatch.setattr(LoopProcessContext, "uses_deepspeed", property(lambda host: True))
    with pytest.raises(DitLoraError, match="so preflight, spike_threshold is not available"):
        Guard.watch(model, optimizer, config=LoopConfig(preflight=True, spike_threshold=8))


def test_answers_alone_are_settings_too() -> None:
    config = LoopConfig.from_recovery_config(RecoveryConfig(max_skips=3))
    assert config == LoopConfig(max_skips=3, on_nonfinite=RecoveryConfig().on_nonfinite)


def test_a_ladder_ends_in_a_stop_and_that_of_a_loop_has_none() -> None:
    assert RecoveryConfig().on_nonfinite[-1] == "stop"
    assert LoopConfig().on_nonfinite == RecoveryConfig().on_nonfinite[:-1]
    assert LoopConfig.from_script_options(None) == LoopConfig()
    assert LoopConfig.from_script_options(0) == LoopConfig.from_recovery_config(RecoveryConfig(max_skips=0))
