"""Rates that are kept, work that is counted, and the seconds that follow from both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.environment.ceilings import (
    H200,
    AttentionRate,
    Ceilings,
    ProductRate,
    ceilings_file,
    load_ceilings,
    read_ceilings,
    save_ceilings,
)
from dit_lora.errors import DitLoraError
from dit_lora.planning import speed
from dit_lora.planning.budget import Launch
from dit_lora.planning.measure import device_name, measure_ceilings
from dit_lora.planning.search import plan
from dit_lora.planning.speed import speed_of
from dit_lora.planning.work import Work
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import render_run
from dit_lora.report.run.words import figures

CPU = torch.device("cpu")
RATES = Ceilings(
    device="a made-up GPU [red]",
    measured="2026-01-02",
    copy=1e9,
    launch=1e-3,
    products=[
        ProductRate("fp32", (8, 8, 8), 1e9),
        ProductRate("bf16", (8, 8, 8), 2e9),
        ProductRate("bf16", (16, 8, 8), 4e9),
        ProductRate("bf16", (32, 8, 8), 8e9),
    ],
    attention=[
        AttentionRate("1x1x8x8x8", "default", False, 3e9, 5e9, same_bits=True),
        AttentionRate("1x1x8x8x8", "flash", True, 1.0, 1.0, same_bits=True),
        AttentionRate("1x1x8x8x8", "default", True, 7e9, 9e9, same_bits=False),
    ],
    about={"torch": "2.13.0"},
)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_flops_and_bytes_are_those_of_the_arithmetic() -> None:
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(7, 5)
    with Work() as work:
        nn.functional.linear(x, weight).exp().sum().backward()
    # One product forward, and of the backward pass that for x alone: the weight is frozen.
    assert work.products == {"fp32": 2 * (2 * 6 * 5 * 7)}
    assert not work.attention
    # exp reads and writes 42 numbers, sum reads them; backward begins with 1, multiplies two of 42, of which one is
    # expanded from 1: what it reads is that.
    own = 4 * ((42 + 42) + (42 + 1) + (1 + 1) + (1 + 42 + 42))
    assert work.bytes == pytest.approx(own, abs=4 * 4)
    assert work.ops >= 6


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_counted_by_direction_and_mask(masked: bool) -> None:
    batch, heads, queries, keys, width = 2, 3, 5, 7, 8
    query = torch.randn(batch, heads, queries, width, requires_grad=True)
    key, value = (torch.randn(batch, heads, keys, width, requires_grad=True) for _ in range(2))
    mask = torch.zeros(batch, 1, 1, keys) if masked else None
    with Work() as work:
        scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    flops = 4 * batch * heads * queries * keys * width
    assert work.attention == {(masked, False): flops, (masked, True): flops * 5 // 2}
    assert not work.products


def made_work() -> Work:
    work = Work()
    work.products["bf16"], work.products["fp32"] = 8_000, 3_000
    work.attention[False, False], work.attention[True, True] = 6_000, 18_000
    work.bytes, work.ops = 5_000, 2
    return work


def test_seconds_are_work_over_rates() -> None:
    found = speed_of(made_work(), RATES, micro_steps=3, trained=100, gpu=True)
    assert found.parts == {
        "products": pytest.approx(3 * (8_000 / 4e9 + 3_000 / 1e9)),
        "attention": pytest.approx(3 * (6_000 / 3e9 + 18_000 / 9e9)),
        "other ops": pytest.approx(3 * 5_000 / 1e9),
        "update": pytest.approx(1_100 / 1e9),
    }
    assert found.host == pytest.approx(3 * 2e-3)
    assert found.seconds == found.host
    assert "bound by the host" in found.words
    assert "rates of a made-up GPU [red], measured on 2026-01-02" in found.words
    on_cpu = speed_of(made_work(), RATES, micro_steps=3, trained=100, gpu=False)
    assert on_cpu.seconds == pytest.approx(sum(found.parts.values()) + found.host)
    quick = speed_of(made_work(), replace(RATES, launch=0.0), micro_steps=1, trained=0, gpu=True)
    assert "host" not in quick.words


def test_rates_are_kept_by_device_and_read_again() -> None:
    assert load_ceilings(RATES.device) is None
    path = save_ceilings(RATES)
    assert path == ceilings_file(RATES.device)
    assert load_ceilings(RATES.device) == RATES
    assert load_ceilings("another GPU") is None
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 0}))
    assert read_ceilings(path) is None
    for broken in ("{", "[]", json.dumps({**content, "products": []}), json.dumps({"version": 1})):
        path.write_text(broken)
        with pytest.raises(DitLoraError, match="delete it and measure again"):
            read_ceilings(path)


def test_this_device_is_measured_and_shown() -> None:
    found = measure_ceilings(CPU, quick=True)
    assert found.device == device_name(CPU)
    assert {one.dtype for one in found.products} >= {"fp32", "bf16"}
    assert all(one.rate > 0 for one in found.products)
    assert {(one.backend, one.masked) for one in found.attention} >= {
        ("default", False),
        ("default", True),
    }
    assert all(one.forward > 0 and one.backward > 0 for one in found.attention)
    assert found.copy > 0
    assert 0 < found.launch < 1e-2
    shown = CliRunner().invoke(app, ["doctor", "--measure", "--quick"]).output
    assert "product of" in shown
    assert "same bits twice" in shown
    assert "not kept: tiny sizes" in shown
    assert load_ceilings(device_name(CPU)) is None
    refused = CliRunner().invoke(app, ["doctor", "--quick"])
    assert isinstance(refused.exception, DitLoraError)


def test_what_a_device_cannot_do_is_noted_and_the_rest_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no fp8 here\nat all")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    found = measure_ceilings(CPU, quick=True)
    assert found.failed["product of fp8"] == "NotImplementedError: no fp8 here"
    assert found.product("fp8") == found.product("fp32")


def planned_step(model: Path, *overrides: str, ceilings: Ceilings) -> speed.Speed:
    recipe = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    given = [f"model.path={model}", "data.path=/nowhere", "validation.prompts=[]", *overrides]
    return plan(recipe, given, Launch(), None, ceilings).speed


def test_a_plan_follows_its_recipe_and_the_rates(tiny_checkpoints: dict[str, Path]) -> None:
    model = tiny_checkpoints["cogvideox-5b"]
    once = planned_step(model, ceilings=RATES)
    twice = planned_step(model, "train.accumulate=2", ceilings=RATES)
    full = planned_step(model, "train.checkpointing=full", ceilings=RATES)
    assert twice.parts["products"] == pytest.approx(2 * once.parts["products"])
    assert twice.parts["update"] == once.parts["update"] > 0
    assert full.parts["products"] > 1.2 * once.parts["products"]
    assert once.parts["attention"] > 0
    faster = planned_step(model, ceilings=replace(RATES, copy=2e9))
    assert faster.parts["other ops"] == pytest.approx(once.parts["other ops"] / 2)
    guessed = planned_step(model, ceilings=H200)
    assert "rates of an H200, measured on 2026-11-26" in guessed.words


def test_a_plan_takes_rates_of_another_machine(tiny_checkpoints: dict[str, Path]) -> None:
    file = save_ceilings(RATES)
    recipe = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")
    given = ["plan", recipe, f"model.path={tiny_checkpoints['cogvideox-5b']}", "data.path=/nowhere"]
    found = CliRunner().invoke(app, [*given, "--ceilings", str(file), "--json"])
    step = json.loads(found.output)["step"]
    assert step["source"] == "rates of a made-up GPU [red], measured on 2026-01-02"
    assert step["seconds"] == pytest.approx(
        max(step["host"], sum(step["device"].values())), rel=1e-3
    )
    shown = CliRunner().invoke(app, [*given, "--ceilings", str(file)]).output
    assert "predicted: " in shown
    assert "made-up GPU [red]" in shown
    file.write_text(json.dumps({"version": 0}))
    refused = CliRunner().invoke(app, [*given, "--ceilings", str(file)])
    assert isinstance(refused.exception, DitLoraError)


def test_a_run_says_how_near_it_came_to_its_prediction(
    lora_main: Any, smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where this device was measured: else a run counts nothing."""
    run = tmp_path / "run"
    common = [*smoke, f"run.dir={run}", "train.steps=2", "train.save_every=2"]
    lora_main(common)
    assert not (run / "prediction.json").exists()
    save_ceilings(replace(RATES, device=device_name(CPU)))
    lora_main([*common, "train.steps=4", "train.resume=auto"])
    kept = json.loads((run / "prediction.json").read_text())
    assert f"predicted: {kept['seconds']:.3g} s a step" in capsys.readouterr().err
    read = RunReader(run).read()
    (figure,) = [one for one in figures(read) if one.label == "Seconds per step"]
    ratio = float(figure.detail.split(" times the ")[0].split(", ")[-1])
    assert ratio == pytest.approx(float(figure.value) / kept["seconds"], rel=0.05)
    assert "predicted by rates of" in render_run(read)
    ceilings_file(device_name(CPU)).write_text("{")
    lora_main([*common, "train.steps=5", "train.resume=auto"])
    assert "no prediction: DitLoraError: " in capsys.readouterr().err
    (run / "prediction.json").write_text('{"seconds": "soon", "source": 3}')
    (figure,) = [one for one in figures(RunReader(run).read()) if one.label == "Seconds per step"]
    assert "predicted" not in figure.detail
