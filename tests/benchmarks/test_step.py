"""The benchmark of whole steps: tiny models in every setting, with losses that lie on top of each other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

SIZES = {
    "cogvideox-5b": 5_570_283_072,
    "sana-1.6b-b8": 1_604_462_752,
    "dit-xl2-b32": 749_826_464,
    "sana-1.6b-b4": 1_604_462_752,
    "dit-xl2-b64": 749_826_464,
    "cogvideox-2b": 1_693_783_872,
    "wan-1.3b": 1_418_996_800,
    "cogvideox-1.5": 5_570_676_352,
}
UNFUSED = ("example", "stock, none", "stock, none, compiled", "example, compiled")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.step", *args],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip


@pytest.mark.thorough
def test_every_setting_trains_tiny_models_with_the_same_losses(tmp_path: Path) -> None:
    process = run(
        "--models", "tiny", "--device", "cpu", "--steps", "2", "--out", str(tmp_path)
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    (written,) = tmp_path.glob("step_*.md")
    assert written.read_text() == process.stdout
    header, *results = map(json.loads, written.with_suffix(".jsonl").read_text().splitlines())
    assert set(header["about"]) >= {"torch", "commit", "device", "command"}
    names = {entry["setting"] for entry in results}
    assert len(results) == 2 * len(names) >= 20
    for result in results:
        label = result["model"], result["setting"]
        assert result["failed"] is None, label
        if result["setting"] == "ours, none":  # the tiny models fit
            assert (result["same_as"], result["seconds"]) == ("ours", []), label
            continue
        assert len(result["seconds"]) == 2, label
        assert len(result["losses"]) == 4, label
        assert len(result["host"]) == (0 if "guard" in result["setting"] else 2), label
        assert result["kernels"]["by_kind"]["products"] > 0, label
        assert ("ours" in result["kernels"]["by_kind"]) == (result["setting"] not in UNFUSED), label
        example = next(entry for entry in results if entry["model"] == result["model"])
        difference = max(abs(a - b) / b for a, b in zip(result["losses"], example["losses"], strict=True))
        assert difference < 1e-3, label
        assert (difference > 0) == (result["setting"] not in UNFUSED), label
    guarded, ours = (
        next(entry["losses"] for entry in results if entry["setting"] == name) for name in ("ours, guard", "ours")
    )
    assert guarded == pytest.approx(ours, rel=1e-6), "the gate changed what is trained"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import step as module

    return module


def test_a_model_that_it_does_not_know_is_refused(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--models", "vast"]) == 2
    assert capsys.readouterr().err.startswith("step: no model is called vast; there are cogvideox-5b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("step: there is no CUDA device here")
    assert not list(tmp_path.iterdir())


def test_a_setting_that_it_does_not_know_is_refused(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--models", "tiny", "--settings", "fastest"]) == 2
    assert capsys.readouterr().err.startswith("step: no setting is called fastest; there are example")


def test_what_does_not_fit_or_fails_says_so_and_the_other_settings_run(
    step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import step_settings

    real_steps = step_settings.build_steps

    def steps(model: Any, entry: Any, setting: Any, *rest: Any) -> Any:
        if setting.checkpointing == "none":
            raise torch.OutOfMemoryError("no room")
        if setting.compiled:
            raise AttributeError("no compiler\nhere")
        return real_steps(model, entry, setting, *rest)

    monkeypatch.setattr(step_settings, "build_steps", steps)
    monkeypatch.setattr(step_settings, "fuse", lambda *_, **__: None)  # the interpreter takes long
    names = ["--settings", "stock, none", "example, compiled", "ours"]
    args = ["--models", "tiny-cogvideox", "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    assert step.main([*args, *names]) == 1
    printed = capsys.readouterr()
    assert "| stock, none | does not fit | - |" in printed.out
    assert "| example, compiled | failed: AttributeError: no compiler | - |" in printed.out
    assert printed.err.endswith("failed: tiny-cogvideox, example, compiled: AttributeError: no compiler\n")
    ours = next(line for line in printed.out.splitlines() if "| ours |" in line)
    assert "left out" not in ours
    assert "failed" not in ours


def test_what_is_measured_before_a_kill_or_the_budgets_end_is_kept(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import step_settings

    real = step_settings.build_steps

    def steps(model: Any, entry: Any, setting: Any, *rest: Any) -> Any:
        if setting.name != "example":
            raise KeyboardInterrupt
        return real(model, entry, setting, *rest)

    args = ["--models", "tiny-sana", "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(step_settings, "build_steps", steps)
    with pytest.raises(KeyboardInterrupt):
        step.main([*args, "--settings", "stock, none"])
    (lines,) = tmp_path.glob("step_*.jsonl")
    (_, example) = map(json.loads, lines.read_text().splitlines())
    assert len(example["seconds"]) == 1
    assert "| tiny-sana | example | 0." in lines.with_suffix(".md").read_text()
    monkeypatch.setattr(step_settings, "build_steps", real)
    assert step.main([*args, "--settings", "stock, none", "--budget", "0"]) == 0
    assert "| tiny-sana | stock, none | left out, the time was up |" in capsys.readouterr().out


def test_the_deterministic_setting_is_undone_and_cublas_is_told_before_its_first_product(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import step_settings

    settings_seen: dict[str, tuple[bool, bool]] = {}
    real = step_settings.sample_losses

    def losses(model: Any, given: Any) -> torch.Tensor:
        is_configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
        settings_seen[running[-1]] = torch.are_deterministic_algorithms_enabled(), is_configured
        return real(model, given)

    running: list[str] = []
    real_steps = step_settings.build_steps

    def steps(model: Any, entry: Any, setting: Any, *rest: Any) -> Any:
        running.append(setting.name)
        return real_steps(model, entry, setting, *rest)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(step_settings, "sample_losses", losses)
    monkeypatch.setattr(step_settings, "build_steps", steps)
    monkeypatch.setattr(step_settings, "fuse", lambda *_, **__: None)  # the interpreter takes long
    args = ["--models", "tiny-sana", "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    assert step.main([*args, "--settings", "ours, deterministic", "example, compiled"]) == 0
    assert settings_seen == {
        "example": (False, True),
        "ours, deterministic": (True, True),
        "example, compiled": (False, True),
    }
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
    assert step.main([*args, "--settings", "example"]) == 0
    assert settings_seen["example"] == (False, False)


def test_ratios_are_of_the_example_and_of_the_best_compiled_stock_model(step: Any) -> None:
    from benchmarks.step_models import TINY
    from benchmarks.step_table import Result, markdown

    def result(setting: str, seconds: float) -> Any:
        return Result("tiny-sana", setting, seconds=[seconds] * 3, host=[0.5], losses=[1.0])

    results = [
        result("example", 4.0),
        result("ours", 2.5),
        result("stock, none, compiled", 2.0),
        result("ours, compiled", 1.0),
        result("example, compiled", 8.0),
    ]
    machine_facts = {"device": "a GPU", "date": "2026-01-01", "command": "step"}
    text = markdown(machine_facts, results, {"tiny-sana": TINY["tiny-sana"]}, 3)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny-sana")]
    assert {row[1]: tuple(row[4:6]) for row in rows} == {
        "example": ("-", "0.500 **slower**"),
        "ours": ("1.600", "0.800 **slower**"),
        "stock, none, compiled": ("2.000", "-"),
        "ours, compiled": ("4.000", "2.000"),
        "example, compiled": ("0.500 **slower**", "0.250 **slower**"),
    }


def test_captions_of_sana_do_not_fill_their_mask_and_differ(step: Any) -> None:
    """Ours drops a mask of ones, and the stock model does not: a full one would flatter us."""
    from benchmarks.step_models import MODELS, Draws

    inputs = MODELS["sana-1.6b-b8"].inputs(Draws(0, torch.device("cpu")))
    lengths = inputs["encoder_attention_mask"].sum(1)
    assert lengths.min() >= 1
    assert lengths.max() < 300
    assert len(set(lengths.tolist())) > 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_backward_kernel", "ours"),
        ("dit_lora::ada_norm", "ours"),
        ("triton_poi_fused_add_mul_0", "compiled"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>",
            "other pointwise",
        ),
    ],
)
def test_kernels_are_told_apart_by_their_names(step: Any, name: str, kind: str) -> None:
    from benchmarks.kernel_time import kind_of

    assert kind_of(name) == kind


def test_a_gpus_kernels_are_added_once_without_the_hosts_calls_and_annotations(step: Any) -> None:
    from benchmarks import kernel_time

    def event(name: str, device: str, start: float, end: float, annotation: bool = False) -> Any:
        return FunctionEvent(
            id=0, name=name, thread=0, start_us=start, end_us=end, use_device="cuda",
            device_type=getattr(DeviceType, device), is_user_annotation=annotation,
        )  # fmt: skip

    events = [
        event("cudaLaunchKernel", "CPU", 0, 900),
        event("Optimizer.step#AdamW.step", "CUDA", 10, 80, annotation=True),
        event("nvjet_tst_128x256", "CUDA", 10, 40),
        event("nvjet_tst_128x256", "CUDA", 40, 60),
        event("_forward_kernel", "CUDA", 60, 70),
    ]
    gpu = torch.device("cuda")
    milliseconds = [kernel_time._milliseconds(recorded_event, gpu) for recorded_event in events]
    assert milliseconds == [
        None,
        None,
        pytest.approx(0.03),
        pytest.approx(0.02),
        pytest.approx(0.01),
    ]


@pytest.mark.parametrize("name", SIZES)
def test_the_real_models_have_their_size_and_take_their_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights: shapes alone."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.step_models import MODELS

    class Shapes:
        device = torch.device("meta")

        def normal(self, *size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device="meta")

        def integers(self, _high: int, *size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device="meta")

    model: Any = MODELS[name]
    assert list(MODELS) == list(SIZES)
    with torch.device("meta"):
        transformer = model.kind.from_config(dict(model.config))
    assert sum(p.numel() for p in transformer.parameters()) == SIZES[name]
    inputs = model.inputs(Shapes())
    output = torch.nn.Module.to(transformer, torch.bfloat16)(**inputs, return_dict=False)[0]
    assert output.shape[model.channels_at] == transformer.config.out_channels
    assert output.shape[0] == inputs["hidden_states"].shape[0]
    assert output.shape[-2:] == inputs["hidden_states"].shape[-2:]
