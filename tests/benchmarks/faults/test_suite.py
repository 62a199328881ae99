"""Every injected fault gets its verdict and its action, on one rank and on two; and the judge can say no."""

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fault_parts import judge_part, split_catalog
from launching import forked
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.faults import phases, suite
from benchmarks.faults.__main__ import app
from benchmarks.faults.fault import Expected, Fault, judge_observation
from benchmarks.faults.suite import catalog, chosen, judge_all, run_suite, totals
from benchmarks.faults.target_table import DEFAULT, FAULT_TARGETS, targets_for
from benchmarks.faults.world import Observation, World
from dit_lora.config.lora import ADAPTER_KINDS
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES, get_family
from dit_lora.families.z_image.checkpoint import TRAINING_SHIFT
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.training import fit


@pytest.mark.slow
def test_a_fault_of_every_cause_and_action_is_named_and_recovered_and_no_file_is_poisoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults, other_faults = split_catalog()
    assert len(faults) >= 30
    assert len(other_faults) > len(faults)
    judge_part(faults, monkeypatch)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("variant", "ranks"), [(DEFAULT, 2), ("videochat2-mistral", 1), ("videochat2-mistral", 2)])
def test_every_fault_is_named_and_recovered_and_no_file_is_poisoned(
    variant: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=forked))
    AcceleratorState._reset_state(reset_partial_state=True)
    results = run_suite(None, ranks, variant)
    failed = {result.name: result.why for result in results if not result.passed}
    assert not failed
    assert len(results) == len(catalog(targets_for(variant), ranks)) >= 60
    assert totals(results)["poisoned_files"] == 0


# One fault for each way in which a family's modules, latents and draws matter. `python -m benchmarks.faults --model`
# runs all of them.
CORE = (
    "NaN in a cached latent_mean",
    "NaN in the noise of one draw",
    "late timesteps that are not finite",
    "Inf loss of one sample",
    "NaN in an adapter weight",
    "NaN in one gradient element, once",
    "NaN in a frozen weight",
    "a fused kernel that gives NaN",
    "OpenDiT's wrong-row modulation",
    "flash attention whose backward gives NaN",
    "an op that overflows for one sample",
    "an Inf that a clamp hides",
    "NaN from the VAE",
    "a truncated checkpoint",
)


# Those that CI judges with no other model, or whose way leads through the network, its latents or its timesteps.
IN_CI = (
    "NaN in a cached latent_mean",
    "late timesteps that are not finite",
    "OpenDiT's wrong-row modulation",
    "flash attention whose backward gives NaN",
    "an op that overflows for one sample",
    "a truncated checkpoint",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ("sana-600m", IN_CI),
        *(
            pytest.param(variant, CORE, marks=pytest.mark.thorough)
            for variant in (
                *("sana-600m", "cogvideox-1.5-i2v", "dit-tiny", "flux-dev", "flux2-klein", "krea2-raw"),
                *("latte", "qwen-image", "sana-video", "video-dit-class", "ltx-video-0.9.1", "sd3.5-medium"),
                *("wan-2.1-i2v", "wan-2.2-t2v-a14b", "wan-2.2-ti2v-5b", "z-image", "chroma", "ernie-image", "anima"),
                *("ideogram-4", "qwen-image-2.1", "kandinsky-5-t2v", "hunyuan-video-1.5"),
            )
        ),
    ],
)
def test_every_familys_faults_are_named_and_recovered(variant: str, names: Sequence[str]) -> None:
    # A call for each sample has no rows to mix up.
    batched = targets_for(variant, "lora").batched
    judge_those([name for name in names if batched or name != "OpenDiT's wrong-row modulation"], variant)


# What is found out by a row, in each of the ways in which that can be.
LATE = (
    "NaN in an adapter weight",
    "NaN in one gradient element, once",
    "all gradients zero, once",
    "NaN loss in the last micro-step",
    "every loss NaN from a step on",
    "NaN in a weight while saving",
)
# In the same ways, at another place.
LATE_TOO = (
    "flash attention whose backward gives NaN",
    "Inf in all gradients, once",
    "NaN loss under a moving average",
    "NaN now and then",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [LATE, pytest.param(sorted({*LATE_TOO, *CORE} - {*LATE}), marks=pytest.mark.thorough)],
)
def test_faults_are_named_and_recovered_where_every_row_is_read_late(
    names: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The suite's runs are short and save so often that most of their rows are read at once."""
    monkeypatch.setattr(fit, "_should_sync_after", lambda run, step: False)
    judge_those(names, DEFAULT)


@pytest.mark.parametrize("variant", ["z-image", "z-image-turbo"])
def test_timesteps_that_run_backwards_are_late_as_often_as_those_of_others(variant: str) -> None:
    sigmas = FlowMatching(TRAINING_SHIFT, 1000).compute_sigmas(
        torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    )
    targets = targets_for(variant)
    assert 0.1 < (1000 * (1 - sigmas) > targets.late).float().mean() < 0.2
    assert 0.2 < (1000 * sigmas >= targets.upper).float().mean() < 0.5


# The same of chat models, with what only they can have.
CHAT_CORE = (
    "Inf loss of one sample",
    "NaN in an adapter weight",
    "NaN in one gradient element, once",
    "NaN in a frozen weight",
    "a fused kernel that gives NaN",
    "flash attention whose backward gives NaN",
    "an op that overflows for one sample",
    "an Inf that a clamp hides",
    "a truncated checkpoint",
    "chat data: an answer that does not fit",
    "chat data: a reserved token",
    "chat:no labels",
    "chat:NaN from the vision encoder for one sample",
    "chat:NaN from the output head for one sample",
    "chat:bad token id",
    "chat:fused LoRA layers that give NaN",
    "chat:a clip that rots",
)
# What is in no other test of the suite, and quick.
CHAT_QUICK = (
    "chat data: an answer that does not fit",
    "chat data: a broken clip",
    "chat data: a part after the end",
    "chat:no labels",
    "chat:fp16 scores in the vision encoder's attention",
    "chat:autocast inside",
    "chat:half trainables in our run",
    "chat:bad token id",
    "chat:half trainables",
    "chat:half trainables after the guard",
    "chat:zero queries in fp16",
)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", sorted(v for v, targets in FAULT_TARGETS.items() if targets.experts))
def test_every_chat_models_faults_are_named_and_recovered(variant: str) -> None:
    judge_those(CHAT_CORE, variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "variant", "faults", "launcher"),
    [
        pytest.param("NaN in*", DEFAULT, 20, forked, marks=pytest.mark.thorough),
        pytest.param(
            *("chat:no labels", "videochat2-mistral", 1, subprocess.run),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_faults_are_named_and_recovered_on_two_ranks(
    pattern: str, variant: str, faults: int, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "subprocess", SimpleNamespace(run=launcher))
    AcceleratorState._reset_state(reset_partial_state=True)
    results = run_suite(pattern, 2, variant)
    assert not {result.name: result.why for result in results if not result.passed}
    assert len(results) >= faults


def test_quick_faults_of_chat_are_named_and_recovered() -> None:
    judge_those(CHAT_QUICK, "videochat2-mistral")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in ADAPTER_KINDS if kind != "lora"])
@pytest.mark.parametrize("variant", [DEFAULT, "sana-600m", "flux2-klein", "wan-2.1-t2v", "videochat2-mistral"])
def test_faults_are_named_and_recovered_with_every_kind_of_adapter(variant: str, kind: str) -> None:
    names = CHAT_CORE if FAULT_TARGETS[variant].experts else CORE
    judge_those([name for name in names if "fused LoRA" not in name], variant, kind)


def judge_those(names: Sequence[str], variant: str, kind: str = "lora") -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    targets = targets_for(variant, kind)
    faults_by_name = {fault.name: fault for fault in catalog(targets)}
    results = list(judge_all([faults_by_name[name] for name in names], targets))
    assert not {result.name: result.why for result in results if not result.passed}
    assert len(results) == len(names)


def test_every_tiny_variant_has_fault_targets() -> None:
    expected = [(name, variant) for name in FAMILIES for variant in get_family(name).tiny_variants]
    variants = [(targets.family, targets.variant) for targets in FAULT_TARGETS.values()]
    assert sorted(variants) == sorted(expected)


def test_the_suite_reaches_every_place_and_every_action() -> None:
    faults = catalog(TARGETS)
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names)
    actions = Counter(fault.expected.action for fault in faults)
    assert {"retry", "skip", "quarantine", "fallback", "rollback", "stop"} <= set(actions)
    causes = {fault.expected.cause for fault in faults}
    assert causes >= {
        "data", "labels", "inputs", "precision", "kernel", "attention_backend",
        "weights", "optimizer", "learning_rate", "transient", "unknown",
    }  # fmt: skip
    assert sum(fault.expected.same_as is not None for fault in faults) > 40


@pytest.fixture
def observation(tmp_path: Path) -> Observation:
    """A run that quarantined `b.mp4` and saved an adapter."""
    verdict = {"cause": "data", "words": "1 NaN", "sample_ids": ["b.mp4"], "module": "x.to_q"}
    event = {"verdict": verdict, "action": "quarantine", "sample_ids": ["b.mp4"]}
    run, cache = tmp_path / "run", tmp_path / "cache"
    (run / "adapter").mkdir(parents=True)
    cache.mkdir()
    return Observation([event], None, {"w": torch.tensor([1.0, 2.0])}, run, cache, "")


TARGETS = targets_for(DEFAULT)
EXPECTED = Expected("data", "quarantine", ("1 NaN",), True, "to_q", "without")


def judge(observation: Observation, expected: Expected = EXPECTED) -> tuple[bool, bool, int]:
    fault = Fault("f", "place", "when", expected)
    result = judge_observation(fault, observation, {"w": torch.tensor([1.0, 2.0])}, "b.mp4", TARGETS)
    assert result.passed == (not result.why and not result.poisoned_files)
    return result.named, result.recovered, result.poisoned_files


def test_the_judge_accepts_what_is_expected(observation: Observation) -> None:
    assert judge(observation) == (True, True, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cause": "weights"},
        {"message_parts": ("2 NaN",)},
        {"module": "to_k"},
    ],
)
def test_the_judge_refuses_another_verdict(observation: Observation, wrong: dict) -> None:  # type: ignore[type-arg]
    assert judge(observation, replace(EXPECTED, **wrong)) == (False, True, 0)


def test_the_judge_refuses_another_sample(observation: Observation) -> None:
    observation.events[0]["verdict"]["sample_ids"] = ["b.mp4", "a.mp4"]
    assert judge(observation) == (False, True, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"action": "rollback"}, {"exit_code": 3}],
)
def test_the_judge_refuses_another_ending(observation: Observation, wrong: dict) -> None:  # type: ignore[type-arg]
    assert judge(observation, replace(EXPECTED, **wrong)) == (True, False, 0)


def test_the_judge_refuses_an_adapter_that_differs_in_one_bit(observation: Observation) -> None:
    assert observation.adapter is not None
    observation.adapter["w"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    assert judge(observation) == (True, False, 0)
    assert judge(observation, replace(EXPECTED, same_as=None, close_to="clean")) == (True, True, 0)


def test_the_judge_counts_poisoned_files_but_not_evidence(observation: Observation) -> None:
    bad = {"w": torch.tensor([torch.nan])}
    (observation.folder / "bundles" / "one").mkdir(parents=True)
    save_file(bad, observation.folder / "bundles" / "one" / "samples.safetensors")
    assert judge(observation) == (True, True, 0)
    save_file(bad, observation.folder / "adapter" / "pytorch_lora_weights.safetensors")
    save_file(bad, observation.cache / "entry.safetensors")
    assert judge(observation) == (True, True, 2)


def test_a_fault_that_is_not_injected_is_not_named(tmp_path: Path) -> None:
    """A clean run must fail every expectation of a verdict: the suite cannot pass by saying nothing."""
    AcceleratorState._reset_state(reset_partial_state=True)
    world = World(tmp_path, Accelerator(cpu=True), TARGETS)
    fault = Fault("nothing", "none", "never", EXPECTED)
    assert not fault.judge(world).named


def test_the_command_prints_json_and_refuses_unknown_names() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    result = CliRunner().invoke(app, ["--only", "NaN in a cached latent_mean", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (line,) = report["faults"]
    assert {"name", "named", "recovered", "poisoned_files"} <= set(line)
    assert report["totals"] == {"faults": 1, "named": 1, "recovered": 1, "poisoned_files": 0}
    with pytest.raises(DitLoraError, match="no fault is called 'x'; there are: NaN in a cached"):
        chosen("x", TARGETS)
