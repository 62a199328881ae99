"""Bundles of loops that are not ours: written at a trip, and run again in the script that made the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import bad_batch, batch
from torch import nn

from dit_lora.commands.replay import replay_bundle
from dit_lora.errors import DitLoraError
from dit_lora.guard import Guard, RecoveryConfig
from dit_lora.guard.attach import bundles as plugin_bundles
from dit_lora.guard.attach.bundles import deserialize_model_call, serialize_model_call
from dit_lora.guard.attach.calls.call_tree import CallSerializer
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.run_script import run_script
from dit_lora.guard.repro_bundle import Bundle, read_replay_bundle, write_replay_bundle

CPU = torch.device("cpu")
SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=6)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(0)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, args.width)
        self.drop = nn.Dropout(0.5)
        self.leave = nn.Linear(args.width, 4)

    def forward(self, x, *, scale, options):
        return {"sample": self.leave(self.drop(self.enter(x))) * options["by"][0] * scale}

encoder = nn.Linear(4, 4).requires_grad_(False)
model = Inner()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn(4 * args.steps, 4, generator=torch.Generator().manual_seed(1))
rows[9, 2] = float("inf")
for x in DataLoader(list(rows), batch_size=4):
    optimizer.zero_grad()
    given = model(encoder(x), scale=0.5, options={"by": (torch.tensor(2.0),), "mode": None})
    given["sample"].square().mean().backward()
    optimizer.step()
open("done", "a").write("whole\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def bundle(script: Path) -> Path:
    """The bundle of the script's third step, in which one sample is not finite."""
    folder = script.parent / "guarded"
    run_script(str(script), ["--steps", "5"], config=RecoveryConfig(), folder=folder)
    (event,) = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert event["step"] == 3
    (script.parent / "done").unlink()
    return folder / event["bundle"]


def test_a_bundle_comes_to_its_verdict_in_the_script_which_takes_no_step(script: Path, bundle: Path) -> None:
    before = (bundle.parent.parent / "guard.json").read_bytes()
    replayed = replay_bundle(bundle, script=str(script), arguments=["--steps", "3"])
    assert replayed.diagnosis is not None
    # The loader has shown that it is item 9; its bundle holds the call, whose rows have no other names.
    assert replayed.recorded_event["verdict"]["cause"] == "data"
    assert replayed.recorded_event["sample_ids"] == ["dataset index 9"]
    assert replayed.diagnosis.cause == "inputs"
    assert replayed.diagnosis.sample_ids == ("row 1 of micro-batch 0",)
    assert replayed.sample_ids == tuple(f"row {row} of micro-batch 0" for row in range(4))
    assert not replayed.notes
    assert not (script.parent / "done").exists()
    assert (bundle.parent.parent / "guard.json").read_bytes() == before


def test_the_call_is_made_with_the_weights_and_the_dropout_of_then(script: Path, bundle: Path) -> None:
    """The healthy rows have the losses of the weights after two steps."""
    (bundle.parent / "again").mkdir()
    mended = read_replay_bundle(bundle)
    number = mended.facts["call"]["args"][0]["tensor"]
    samples = {**mended.samples, number: mended.samples[number].nan_to_num(0.0, 0.0, 0.0)}
    facts = {**mended.facts, "call": {**mended.facts["call"], "output_is_finite": True}}
    write_replay_bundle(bundle.parent / "again", facts, samples, mended.weights, limit_mib=1)
    replayed = replay_bundle(bundle.parent / "again", script=str(script))
    w = mended.weights
    torch.set_rng_state(mended.samples[facts["call"]["random_state"]["tensor"]])
    hidden = nn.functional.dropout(samples[number] @ w["enter.weight"].T + w["enter.bias"], 0.5)
    output = hidden @ w["leave.weight"].T + w["leave.bias"]
    (packed,) = facts["call"]["output_gradients"]
    gradient = samples[packed["tensor"]]
    expected = (output * gradient).sum(1)[[0, 2, 3]]
    losses = torch.tensor(replayed.outcome.losses)[[0, 2, 3]]
    assert expected.isfinite().all()
    torch.testing.assert_close(losses, expected)


def test_without_a_script_it_says_what_it_needs(bundle: Path) -> None:
    with pytest.raises(DitLoraError, match=r"^[^\n]*--script SCRIPT.py \[-- ARGS\][^\n]*$"):
        replay_bundle(bundle)
    with pytest.raises(DitLoraError, match="the script decides both"):
        replay_bundle(bundle, script="train.py", device="cpu")


def test_a_model_that_does_not_fit_is_told_parameter_by_parameter(script: Path, bundle: Path) -> None:
    with pytest.raises(DitLoraError) as error:
        replay_bundle(bundle, script=str(script), arguments=["--width", "5", "--steps", "40"])
    summary, *differing = str(error.value).splitlines()
    assert "fits the bundle's Inner (called: Linear, Inner)" in summary
    assert differing == [
        "  - enter.weight: 6x4 in the bundle, 5x4 here",
        "  - enter.bias: 6 in the bundle, 5 here",
        "  - leave.weight: 4x6 in the bundle, 4x5 here",
    ]
    assert not (script.parent / "done").exists()  # it left at the second step


def test_a_script_that_catches_errors_is_left_all_the_same(script: Path, bundle: Path) -> None:
    catching = SCRIPT.replace("    given = model(", "    try:\n        given = model(")
    catching = catching.replace("    given[", "    except Exception:\n        continue\n    given[")
    script.write_text(catching)
    with pytest.raises(DitLoraError, match="no component is called 'attention:none'"):
        replay_bundle(bundle, script=str(script), without=["attention:none"])
    assert replay_bundle(bundle, script=str(script), fp32=True).diagnosis is not None
    assert not (script.parent / "done").exists()


def test_a_script_that_ends_before_is_told(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(DitLoraError, match=r"did not call a model in training; .* of Inner"):
        replay_bundle(bundle, script=str(tmp_path / "other.py"))


def test_a_model_within_a_wrapper_is_found(script: Path, bundle: Path) -> None:
    wrapped = SCRIPT.replace("model = Inner()", "model = Around(Inner())").replace(
        "encoder = nn",
        """class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, **how):
        return self.inner(x, **how)

encoder = nn""",
    )
    script.write_text(wrapped)
    replayed = replay_bundle(bundle, script=str(script))
    assert replayed.diagnosis is not None
    assert replayed.diagnosis.cause == "inputs"
    assert replayed.diagnosis.sample_ids == ("row 1 of micro-batch 0",)


def in_a_bundle(call: CapturedCall, tmp_path: Path) -> Bundle:
    writer = CallSerializer(call.generator)
    ids = {"ids": list(call.ids), "micro_step": call.micro_step}
    facts = {
        "call": serialize_model_call(call, writer),
        "replay": {**ids, "step": 1, "rank": 0},
        "event": {"kind": "non_finite_loss"},
        **{"packages": {}, "switched_off": [], "start_peak": 0.0},
    }
    left_out = writer.omitted_values
    write_replay_bundle(tmp_path / "b", facts, writer.tensors, {}, limit_mib=1, missing_parts=left_out)
    return read_replay_bundle(tmp_path / "b")


def call_of(*args: Any, **kwargs: Any) -> CapturedCall:
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    torch.randn(3, generator=generator)  # the loop draws on
    return CapturedCall(
        args,
        kwargs,
        ("a", "b"),
        torch.get_rng_state(),
        None,
        generator=(generator, state),
        outputs=(torch.zeros(2),),
        output_gradients=[torch.tensor([torch.nan, 1.0])],
        micro_step=3,
    )


def test_a_tree_of_tensors_and_plain_values_comes_back(tmp_path: Path) -> None:
    x = torch.randn(2, 6)
    call = call_of(
        [x, (x[:, ::2], x), torch.Size([2, 3])],
        None,
        flags={
            "a": True,
            3: -(2**40),
            "": {"token_embedding": float("-inf"), "dtype": torch.bfloat16},
        },
        mode="fast",
        rate=0.1,
        half=torch.tensor([1.5, torch.inf]).bfloat16(),
        on=torch.device("cpu"),
    )
    call.kwargs["draws"] = call.generator[0]  # type: ignore[index]
    back = deserialize_model_call(in_a_bundle(call, tmp_path), nn.Linear(1, 1), CPU)
    (restored, (strided, restored_again), size), restored_none = back.args
    assert torch.equal(restored, x)
    assert torch.equal(strided, x[:, ::2])
    assert restored_again is restored or torch.equal(restored_again, x)
    assert (type(back.args[0]), type(back.args[0][1])) == (list, tuple)
    assert (size, restored_none) == ((2, 3), None)
    assert back.kwargs["flags"] == call.kwargs["flags"]
    assert (back.kwargs["mode"], back.kwargs["rate"]) == ("fast", 0.1)
    assert back.kwargs["half"].dtype is torch.bfloat16
    assert torch.equal(back.kwargs["half"], call.kwargs["half"])
    assert back.generator is not None
    assert back.kwargs["draws"] is back.generator[0]
    assert torch.equal(back.generator[1], call.generator[1])  # type: ignore[index]
    assert torch.equal(back.random_state, call.random_state)
    (gradient,) = back.output_gradients
    assert gradient is not None
    assert gradient.isnan().tolist() == [True, False]
    assert (back.ids, back.micro_step, back.has_finite_output) == (("a", "b"), 3, True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nn.Identity(), "a torch.nn.modules.linear.Identity"),
        (torch.eye(2).to_sparse(), "a tensor of torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "a tensor of torch.complex128"),
        ({1.5: "x"}, "a builtins.dict"),
    ],
    ids=["object", "sparse", "complex", "keys"],
)
def test_what_is_neither_is_left_out_and_said(value: Any, words: str, tmp_path: Path) -> None:
    reason = f"states\\[0\\]: {words} is neither a tensor nor a plain value"
    with pytest.raises(DitLoraError, match=f"cannot be replayed: it lacks {reason}"):
        in_a_bundle(call_of(torch.zeros(2), states=[value]), tmp_path)


def guarded(config: RecoveryConfig, bad: tuple[int, ...], steps: int = 6) -> Guard:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = Guard.watch(model, optimizer, config=config, folder="guard")
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with guard.microbatch([f"{step}-{row}" for row in range(3)]):
            loss = model((bad_batch if step in bad else batch)(step)).square().mean()
        loss.backward()
        optimizer.step()
    guard.detach()
    return guard


def written() -> list[str]:
    return sorted(path.name for path in Path("guard/bundles").glob("*"))


def test_bundles_are_as_many_as_the_settings_say() -> None:
    guard = guarded(RecoveryConfig(bundles=2), (2, 3, 5))
    assert written() == [f"step_00000{step}_rank_0_micro_step_0" for step in (2, 3)]
    paths = [event.get("bundle") for event in guard.events]
    assert paths == [*(f"bundles/{name}" for name in written()), None]
    guarded(RecoveryConfig(bundles=1), (2,))  # another start in the same folder
    assert written()[1] == "step_000002_rank_0_micro_step_0_again_1"


def test_none_is_written_where_none_is_asked_for() -> None:
    guarded(RecoveryConfig(bundles=0), (2,))
    assert written() == []


def test_what_is_too_large_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    guarded(RecoveryConfig(bundle_mib=1e-4), (2,))
    (name,) = written()
    facts = json.loads(Path("guard/bundles", name, "bundle.json").read_text())
    assert "samples.safetensors: 0 MiB, more than guard.bundle_mib" in facts["left_out"]
    assert "cannot be replayed: it lacks" in caplog.text


def test_without_safetensors_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin_bundles.util, "find_spec", lambda name: None)
    guard = guarded(RecoveryConfig(), (2, 4))
    assert written() == []
    assert not any("bundle" in event for event in guard.events)
    assert caplog.text.count("safetensors is not installed") == 1


def test_a_disk_that_takes_no_bundle_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    Path("guard").mkdir()
    Path("guard/bundles").write_text("a file")
    guard = guarded(RecoveryConfig(), (2,))
    assert [event["action"] for event in guard.events] == ["skip"]
    assert "cannot write guard/bundles/step_000002" in caplog.text


def test_guard_json_says_what_is_watched_and_what_was_lost() -> None:
    guards = [guarded(RecoveryConfig(max_skips=7), bad) for bad in ((2, 4), ())]
    first_start, second = json.loads(Path("guard/guard.json").read_text())["starts"]
    assert (first_start["taken"], first_start["lost"], first_start["ended"]) == (4, 2, True)
    assert (second["taken"], second["lost"]) == (6, 0)
    model = {"name": "Sequential", "class": "Sequential", "parameters": 23, "trained": 23}
    assert first_start["models"] == [{**model, "dtypes": ["float32"]}]
    assert (first_start["optimizers"], first_start["loop"], first_start["ranks"]) == (
        ["SGD"],
        "plain PyTorch",
        1,
    )
    assert first_start["settings"]["max_skips"] == 7
    assert "torch" in first_start["versions"]
    assert {event["guard"] for event in guards[0].events} == {first_start["id"]}


@pytest.mark.parametrize(("setting", "value"), [("bundles", -1), ("bundles", 1.5), ("bundle_mib", 0)])
def test_a_setting_out_of_its_bounds_is_refused(setting: str, value: float) -> None:
    with pytest.raises(DitLoraError, match=f"{setting}={value}"):
        RecoveryConfig(**{setting: value})  # type: ignore[arg-type]
