"""The kernels' benchmark: all ops at a tiny shape on a CPU, honest bytes, floors, losses and failures."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT

BENCH = ROOT / "kernels" / "bench"
OPS = (
    "ada_norm",
    "ada_norm_gated",
    "qk_norm_rope",
    "lora_linear",
    "lora_qkv",
    "relu_linear_attention",
    "silu_dwconv_glu",
    "finite_norms",
)
COLUMNS = ("eager", "autocast", "compiled", "ours")
CPU = torch.device("cpu")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(BENCH / "bench.py"), "--device", "cpu", *args],
        env=environment, cwd="/", capture_output=True, text=True, timeout=1200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The Markdown and the JSON lines of one run over every op."""
    folder = tmp_path_factory.mktemp("bench")
    process = run("--shapes", "tiny", "--out", str(folder), "--seconds-per-case", "0.02")
    assert process.returncode == 0, process.stderr
    (markdown,), (lines,) = folder.glob("*.md"), folder.glob("*.jsonl")
    assert markdown.read_text() == process.stdout
    return process.stdout, [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules `cases` and `columns`, imported as the script does."""
    monkeypatch.syspath_prepend(BENCH)
    import cases
    import columns

    return cases, columns


def test_every_op_has_a_row_for_each_pass_and_says_what_ran(
    tiny: tuple[str, list[dict[str, Any]]],
) -> None:
    text, (head, *rows) = tiny
    expected_rows = [(op, p) for op in OPS[:-1] for p in ("forward", "forward+backward")]
    assert [(row["op"], row["pass"]) for row in rows] == [*expected_rows, (OPS[-1], "forward")]
    assert head["about"]["ours"] == "reference"
    assert "ours (reference)" in text
    assert "torch.compile (aot_eager)" in text
    for name in ("command", "commit", "python", "torch", "triton", "threads"):
        assert f"- {name}: {head['about'][name]}" in text
    for row in rows:
        assert tuple(row["cells"]) == COLUMNS  # no library on a CPU
        for cell in row["cells"].values():
            times = cell["times"]
            assert 0 < times["p20"] <= times["p50"] <= times["p80"]
            assert cell["failed"] is None
        lines = [line for line in text.splitlines() if line.startswith(f"| {row['op']} | tiny | {row['pass']} |")]
        assert len(lines) == 2
        medians = [row["cells"][name]["times"]["p50"] for name in COLUMNS]
        ratio = min(medians[:-1]) / medians[-1]
        assert f" | {ratio:.2f}{' **slower**' if ratio < 1 else ''} | " in lines[0]


def test_a_table_names_clocks_versions_and_the_commit_where_there_is_no_git(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    import report

    from benchmarks import machine

    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 580.1, 1755 MHz, 1980 MHz, 3201 MHz, 402.11 W, 700.00 W, 41\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DIT_LORA_COMMIT", "abc1234")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    machine_facts = report.facts(torch.device("cuda"), ["bench.py", "--op", "lora qkv"], 4e12)
    text = report.markdown(machine_facts, [], [], [])
    assert text.startswith("# Kernels on NVIDIA H200, ")
    facts = ("commit: abc1234", "driver: 580.1", "clock: 1755 MHz", "highest clock: 1980 MHz",
            "memory clock: 3201 MHz", "command: bench.py --op 'lora qkv'", f"torch: {metadata.version('torch')}",
            "copy: 4e+12 bytes a second, read and written")  # fmt: skip
    for line in facts:
        assert f"- {line}\n" in text
    for name in ("python", "triton", "cudnn", "power"):
        assert f"- {name}: " in text
    assert "torch.compile (inductor)" in text


def test_ours_is_as_near_to_fp64_as_eager(tiny: tuple[str, list[dict[str, Any]]]) -> None:
    for row in tiny[1][1:]:
        errors = {name: cell["error"] for name, cell in row["cells"].items()}
        assert errors["ours"] <= 1.25 * errors["eager"] + 2**-9, (row["op"], errors)
        assert errors["ours"] < 2e-2
        assert errors["ours"] > 0 or row["op"] == "finite_norms"  # which is in fp64 itself
        assert errors["compiled"] == pytest.approx(errors["eager"], rel=0.2)


def test_the_floor_is_bytes_at_the_copys_rate_and_the_base_layers(
    tiny: tuple[str, list[dict[str, Any]]],
) -> None:
    head, *rows = tiny[1]
    rate = float(head["about"]["copy"].split()[0])
    for row in rows:
        assert (row["base_ms"] > 0) == row["op"].startswith("lora")
        assert row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / rate + row["base_ms"], rel=1e-3)
        median = row["cells"]["ours"]["times"]["p50"]
        assert row["percent_of_floor"] == pytest.approx(100 * row["floor_ms"] / median)


@pytest.mark.parametrize("op", OPS)
def test_bytes_are_those_of_the_tensors(op: str, scripts: Any) -> None:
    case = scripts[0].build(op, "tiny", CPU)
    forward, backward = counted(case)
    assert (case.traffic.forward, case.traffic.backward) == (forward, backward)


def counted(case: Any) -> tuple[int, int]:
    """Bytes read and written, from what goes in, comes out and is kept for the backward."""
    inputs = dict(case.given)
    trained = [inputs[name].requires_grad_() for name in case.trained]
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = case.ours(inputs)
    if case.op == "finite_norms":
        return sum(t.nbytes + 28 * math.ceil(t.numel() / 4096) for t in inputs.values()), 0
    dx = inputs["x"].nbytes if case.op.startswith("lora") else 0
    if dx:
        ys = sum(output.nbytes for output in outs)
        return dx + 2 * ys, dx + 2 * ys + 2 * dx  # what the adapters add to the base layers
    input_storages = {t.untyped_storage().data_ptr() for t in inputs.values()}
    new_outputs = [output for output in outs if output.untyped_storage().data_ptr() not in input_storages]
    input_storages |= {output.untyped_storage().data_ptr() for output in outs}
    statistics = sum(t.nbytes for at, t in saved.items() if at not in input_storages)
    forward = sum(t.nbytes for t in [*inputs.values(), *new_outputs]) + statistics
    grads = torch.autograd.grad(outs, trained, [torch.ones_like(output) for output in outs])
    moved_tensors = [*outs, *saved.values(), *grads]  # a gradient is as large as its output
    backward = sum(t.nbytes for t in moved_tensors)
    if case.op.startswith("ada_norm"):
        backward -= inputs["bias"].nbytes  # kept, and read only where a scale is trained
    if case.op == "silu_dwconv_glu":
        backward += 3 * inputs["h"].nbytes  # dc written and read, h read once more
    return forward, backward


def test_a_block_of_cogvideox_5b_moves_what_the_plan_says(scripts: Any) -> None:
    """Passes over (17776, 3072) in bf16, forward and backward."""
    cases, _ = scripts
    u = 17776 * 3072 * 2
    passes = {}
    for op in OPS[:5]:
        traffic = cases.build(op, "cogvideox_5b", torch.device("meta")).traffic
        passes[op] = (round(traffic.forward / u, 1), round(traffic.backward / u, 1))
    assert passes == {
        "ada_norm": (2.0, 4.0),
        "ada_norm_gated": (4.0, 5.0),
        "qk_norm_rope": (2.1, 3.1),  # tables of rotations and statistics are a tenth
        "lora_linear": (3.0, 5.0),
        "lora_qkv": (7.0, 9.0),
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--op", "nope"], "no op is called nope; there are ada_norm"),
        (["--shapes", "huge"], "no shape is called huge; there are cogvideox_5b"),
        (["--op", "silu_dwconv_glu", "--shapes", "ltx"], "ltx has no silu_dwconv_glu"),
    ],
)
def test_what_it_does_not_know_is_refused_in_one_line(
    args: list[str], words: str, scripts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench as script

    assert script.main(["--device", "cpu", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"bench: {words}")
    assert printed.err.count("\n") == 1


def test_without_time_it_says_what_it_left_out(
    tmp_path: Path, scripts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench as script

    args = ["--shapes", "tiny", "--op", "ada_norm", "--budget", "0", "--out", str(tmp_path)]
    assert script.main(["--device", "cpu", *args]) == 0
    assert "Left out, the time was up:\n\n- ada_norm tiny\n" in capsys.readouterr().out


def test_a_failure_is_listed_and_is_the_exit_code(
    tmp_path: Path,
    scripts: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bench as script

    def unbuildable(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setitem(scripts[0]._MAKERS, "ada_norm", unbuildable)
    args = ["--shapes", "tiny", "--op", "ada_norm", "finite_norms", "--seconds-per-case", "0.01"]
    assert script.main(["--device", "cpu", *args, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "Failed:\n\n- ada_norm tiny: RuntimeError: no room\n" in printed.out
    assert "| finite_norms | tiny | forward | " in printed.out
    assert "failed: ada_norm tiny: RuntimeError: no room" in printed.err


def test_a_column_that_fails_says_so_and_the_others_are_measured(scripts: Any) -> None:
    cases, columns = scripts

    def broken(_given: Any) -> Any:
        raise torch.OutOfMemoryError("no room\nand more")

    case = dataclasses.replace(cases.build("ada_norm", "tiny", CPU), ours=broken)
    row = columns.rows_of(case)[1]
    columns.measure(case, row, columns.Clock(CPU), 1e9, 0.01)
    assert row.failures() == ["ada_norm tiny forward+backward ours: OutOfMemoryError: no room"]
    assert row.percent_of_floor is None
    for name in COLUMNS[:-1]:
        assert row.cells[name].times is not None


def test_quantiles_and_the_spread_of_repetitions(scripts: Any) -> None:
    _, columns = scripts
    times = columns.timing.summarize([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert (times.p20, times.p50, times.p80) == (2.0, 2.0, 4.0)
    assert times.spread == pytest.approx((4 - 2) / times.p50)
