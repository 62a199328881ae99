"""Each check passes a sound model and names the fault of a broken one."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.guard import checks
from dit_lora.guard.attention_backends import AttentionCall, BackendParity, record_attention_calls
from dit_lora.guard.checks import CheckFinding, check_gradient_flow
from dit_lora.guard.stored_precision import check_stored_precision, read_stored_dtype

Run = Callable[[], Any]
B = "transformer_blocks.1.attn1.to_k.lora_B.default.weight"
A = B.replace("lora_B", "lora_A")
BASE = "transformer_blocks.0.ff.net.2.weight"


@pytest.fixture
def transformer(tiny_checkpoints: dict[str, Path]) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel.from_pretrained(
        tiny_checkpoints["cogvideox-2b"], subfolder="transformer"
    ).requires_grad_(False)
    attach_lora(model, LoraConfig(rank=4), get_family("cogvideox").lora_targets, seed=0)
    return model.train()


@pytest.fixture
def forward(transformer: nn.Module) -> Run:
    random = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 3, 4, 4, 6, generator=random)
    text = torch.randn(2, 226, 32, generator=random)
    return lambda: transformer(latents, text, torch.tensor([3, 700]), return_dict=False)[0]


@pytest.fixture
def backward(forward: Run) -> Run:
    return lambda: forward().square().mean().backward()


def wrong(findings: list[CheckFinding]) -> list[CheckFinding]:
    return [finding for finding in findings if not finding.ok]


def the_one(findings: list[CheckFinding]) -> CheckFinding:
    (finding,) = wrong(findings)
    return finding


def test_a_lora_as_attached_passes_every_check_of_weights(transformer: nn.Module) -> None:
    findings = checks.check_trainables(transformer) + checks.check_base_weights(transformer)
    assert [(finding.ok, finding.fatal) for finding in findings] == [(True, False)] * 3
    assert "all 16 trainable tensors are fp32" in findings[0].message


def test_every_trainable_in_half_precision_is_named_with_its_dtype(transformer: nn.Module) -> None:
    transformer.get_parameter(A).data = transformer.get_parameter(A).data.half()
    transformer.get_parameter(B).data = transformer.get_parameter(B).data.bfloat16()
    finding = the_one(checks.check_trainables(transformer))
    assert finding.fatal
    assert f"{A} is torch.float16" in finding.message
    assert f"{B} is torch.bfloat16" in finding.message
    assert finding.message.count("\n") == 2


def test_a_model_with_nothing_to_train_is_refused(transformer: nn.Module) -> None:
    assert the_one(checks.check_trainables(transformer.requires_grad_(False))).fatal


def test_a_weight_that_is_not_finite_is_named(transformer: nn.Module) -> None:
    with torch.no_grad():
        transformer.get_parameter(A)[0, 0] = torch.nan
        transformer.get_parameter(BASE)[3, 1] = -torch.inf
    finding = the_one(checks.check_trainables(transformer))
    assert finding.fatal
    assert f"{A} has 1 NaN among 256 values" in finding.message
    finding = the_one(checks.check_base_weights(transformer))
    assert finding.fatal
    assert f"{BASE} has 1 Inf" in finding.message
    assert finding.message.count("\n") == 1


def test_quantised_weights_are_not_looked_at() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    model[0].weight = nn.Parameter(torch.ones(4, 3).to(torch.float8_e4m3fn), requires_grad=False)
    model[1].weight = nn.Parameter(torch.ones(5, 4).int(), requires_grad=False)
    assert not wrong(checks.check_base_weights(model))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_policy_that_nothing_leaves_passes(transformer: nn.Module, forward: Run, dtype: torch.dtype | None) -> None:
    run = forward if dtype is None else under_bf16(forward)
    findings = checks.check_autocast(transformer, run, dtype)
    assert len(findings) == 2
    assert not wrong(findings)
    assert not any(module._forward_pre_hooks for module in transformer.modules())


class Nested(nn.Module):
    """A block that opens its own autocast around one of its two layers."""

    def __init__(self, dtype: torch.dtype, enabled: bool = True) -> None:
        super().__init__()
        self.free = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.how = (dtype, enabled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.free(x)
        with torch.autocast("cpu", self.how[0], enabled=self.how[1]):
            return self.inner(x.float())


def under_bf16(run: Run) -> Run:
    return torch.autocast("cpu", torch.bfloat16)(run)


def test_a_nested_autocast_of_another_dtype_is_named_where_it_begins() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Nested(torch.float16))
    run = partial(model, torch.ones(2, 3))
    finding = the_one(checks.check_autocast(model, under_bf16(run), torch.bfloat16))
    assert finding.fatal
    assert "1.inner runs under torch.float16" in finding.message
    assert "1.free" not in finding.message
    assert "1.inner.0" not in finding.message
    finding = the_one(checks.check_autocast(model, run, None))
    assert "the policy is no autocast" in finding.message
    assert finding.fatal


def test_an_autocast_inside_an_island_is_named_too() -> None:
    island = Nested(torch.bfloat16, enabled=False)
    island.inner[1] = Nested(torch.float16)
    model = nn.Sequential(nn.Linear(3, 3), island)
    run = under_bf16(partial(model, torch.ones(2, 3)))
    other_findings, autocast_finding = wrong(checks.check_autocast(model, run, torch.bfloat16))
    assert "1.inner.1.inner runs under torch.float16" in other_findings.message
    assert other_findings.fatal
    assert "1.inner runs without autocast" in autocast_finding.message
    assert not autocast_finding.fatal


def test_accelerates_autocast_is_no_offence(transformer: nn.Module, forward: Run) -> None:
    transformer.forward = under_bf16(transformer.forward)  # type: ignore[method-assign]
    assert not wrong(checks.check_autocast(transformer, forward, torch.bfloat16))
    assert wrong(checks.check_autocast(transformer, forward, None))


def test_an_autocast_that_nobody_opens_is_named(transformer: nn.Module, forward: Run) -> None:
    finding = the_one(checks.check_autocast(transformer, forward, torch.bfloat16))
    assert "transformer_blocks.0 runs without autocast" in finding.message
    assert "proj_out runs without autocast" in finding.message


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_in_a_sound_model_and_are_cleared(
    transformer: nn.Module, backward: Run, checkpointing: bool
) -> None:
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    transformer.get_parameter(A).grad = torch.full((4, 64), torch.nan)  # an earlier batch's
    findings = check_gradient_flow(transformer, backward)
    assert len(findings) == 3
    assert not wrong(findings)
    assert all(parameter.grad is None for parameter in transformer.parameters())


def test_what_a_cut_graph_does_not_reach_is_named(transformer: nn.Module, backward: Run) -> None:
    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(tensor.detach() for tensor in output)

    transformer.get_submodule("transformer_blocks.0").register_forward_hook(cut)
    finding = the_one(check_gradient_flow(transformer, backward))
    assert finding.fatal
    assert finding.message.count("transformer_blocks.0") == 8
    assert "transformer_blocks.0.attn1.to_q.lora_B.default.weight: no gradient" in finding.message
    assert "transformer_blocks.1" not in finding.message


def test_of_gradients_of_zeros_only_bs_is_named(transformer: nn.Module, backward: Run) -> None:
    transformer.get_parameter(B).register_hook(torch.zeros_like)
    finding = the_one(check_gradient_flow(transformer, backward))
    assert finding.message.endswith(f"  - {B}: a gradient that is all zero")


def test_bad_and_frozen_gradients_are_named(transformer: nn.Module, backward: Run) -> None:
    transformer.get_parameter(B).register_hook(lambda grad: grad * torch.nan)

    def leaking() -> None:
        transformer.get_parameter(BASE).requires_grad_(True)
        backward()

    finite, frozen = wrong(check_gradient_flow(transformer, leaking))
    assert f"gradient of {B} has 256 NaN" in finite.message
    assert finite.fatal
    assert frozen.message.endswith(f"  - {BASE}")
    assert frozen.fatal
    assert all(parameter.grad is None for parameter in transformer.parameters())


def test_a_probe_that_fails_leaves_no_gradient(transformer: nn.Module, backward: Run) -> None:
    def failing() -> None:
        backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_gradient_flow(transformer, failing)
    assert all(parameter.grad is None for parameter in transformer.parameters())


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("compute", "peak", "ok", "fatal"),
    [
        (F16, None, True, False),
        (F16, 100.0, True, False),
        (F32, 100.0, True, False),
        (BF16, 100.0, False, False),
        (BF16, 65504.0, False, False),
        (BF16, None, False, False),
        (F32, None, False, False),
        (BF16, 65600.0, False, True),
        (F32, 1e6, False, True),
        (BF16, torch.inf, False, True),
        (BF16, torch.nan, False, True),
    ],
)
def test_weights_stored_in_fp16_are_judged_by_what_was_probed(
    compute: torch.dtype, peak: float | None, ok: bool, fatal: bool
) -> None:
    (finding,) = check_stored_precision(F16, compute, peak)
    assert (finding.ok, finding.fatal) == (ok, fatal), finding.message


def test_weights_stored_otherwise_are_refused_in_fp16_alone() -> None:
    for stored_dtype, compute, peak in product((BF16, F32, None), (BF16, F32, F16), (1e6, None)):
        (finding,) = check_stored_precision(stored_dtype, compute, peak)
        assert finding.fatal == (compute is F16 and stored_dtype is not None)
        assert finding.ok != finding.fatal


def test_a_warning_says_what_was_probed_and_how_near_it_came() -> None:
    (finding,) = check_stored_precision(F16, BF16, 655.04)
    assert "in torch.float16 and computed in torch.bfloat16; " in finding.message
    assert "probed on one batch and reach 655, 100 times below" in finding.message
    (finding,) = check_stored_precision(F16, BF16, 1e6)
    assert "reach 1e+06, beyond fp16's 65504" in finding.message
    assert "clamp" in finding.message
    (finding,) = check_stored_precision(F16, BF16, None)
    assert "was not probed" in finding.message


def test_the_stored_dtype_is_that_of_most_values_over_all_files(tmp_path: Path) -> None:
    first_path, second_path = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file(
        {"a": torch.zeros(3, 5).half(), "b": torch.zeros(2), "ids": torch.arange(900)},
        first_path,
        metadata={"format": "pt"},
    )
    save_file({f"norm.{i}": torch.zeros(1) for i in range(9)} | {"c": torch.zeros(7).half()}, second_path)
    # 22 values against 11, in 2 tensors against 10.
    assert read_stored_dtype([first_path, second_path]) is torch.float16
    assert read_stored_dtype([second_path]) is torch.float32
    save_file({"ids": torch.arange(900)}, second_path)
    assert read_stored_dtype([second_path]) is None
    assert read_stored_dtype([]) is None


@pytest.mark.parametrize("content", [b"", b"no header!", (2**62).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "torn.safetensors"
    file.write_bytes(content)
    with pytest.raises(DitLoraError, match=r"torn\.safetensors"):
        read_stored_dtype([file])


@pytest.fixture
def calls() -> list[AttentionCall]:
    query, key, value = torch.randn(3, 2, 4, 6, 16)
    with record_attention_calls() as recorded:
        F.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return list(recorded)


def test_the_attention_of_a_cpu_passes(calls: list[AttentionCall]) -> None:
    cuda_calls = [replace(call, device=torch.device("cuda")) for call in calls]
    findings, disabled = checks.check_attention_backends(cuda_calls, torch.device("cpu"))
    assert not wrong(findings)
    assert disabled == []
    messages = {finding.check: finding.message for finding in findings}
    assert messages["attention backend math"].startswith("correct for 2 of 2 calls")
    assert messages["attention backend cudnn"].startswith("not used: No viable backend")
    assert messages["attention"] == "all 2 attention calls have a correct backend"


def spoil(monkeypatch: pytest.MonkeyPatch, broken: set[tuple[str, bool]], error: float) -> None:
    """Make `measure_backend_parity` find this error in these backends at the causal or the other call."""
    original = checks.measure_backend_parity

    def parity(call: AttentionCall, name: str) -> BackendParity:
        result = original(call, name)
        if (name, call.is_causal) in broken:
            return replace(result, errors={**result.errors, "dq": error})
        return result

    monkeypatch.setattr(checks, "measure_backend_parity", parity)


@pytest.mark.parametrize("error", [0.5, torch.nan])
def test_a_wrong_backend_is_named_with_its_call_and_error_and_disabled(
    monkeypatch: pytest.MonkeyPatch, calls: list[AttentionCall], error: float
) -> None:
    spoil(monkeypatch, {("flash", True)}, error)
    findings, disabled = checks.check_attention_backends(calls, torch.device("cpu"))
    finding = the_one(findings)
    assert finding.check == "attention backend flash"
    assert not finding.fatal  # the run goes on without it
    assert disabled == ["flash"] == checks.find_wrong_backends(findings)
    assert "wrong for 1 of 2 calls" in finding.message
    assert "q 2x4x6x16" in finding.message
    assert "causal" in finding.message
    assert f"dq {error:.1e}" in finding.message


def test_a_call_that_only_disabled_backends_get_right_is_fatal(
    monkeypatch: pytest.MonkeyPatch, calls: list[AttentionCall]
) -> None:
    spoil(monkeypatch, {("flash", True), ("math", False)}, 0.5)
    findings, disabled = checks.check_attention_backends(calls, torch.device("cpu"))
    assert disabled == ["flash", "math"]
    assert findings[-1].fatal
    assert findings[-1].message.count("\n") == 2  # both calls


FACTS = {"torch": "2.13", "dtype": torch.bfloat16, "shape": (1, 2)}
GOOD = [CheckFinding("a", True, "fine", False), CheckFinding("b", False, "look", False)]


def test_a_check_runs_once_for_the_same_facts(tmp_path: Path) -> None:
    path, check = tmp_path / "preflight.json", Mock(return_value=GOOD)
    assert checks.check_with_cache(path, FACTS, check) == GOOD
    assert checks.check_with_cache(path, dict(reversed(FACTS.items())), check) == GOOD
    assert check.call_count == 1
    other_check = Mock(return_value=[CheckFinding("c", True, "other", False)])
    for changed_facts in (
        {"torch": "2.14"},
        {"dtype": torch.float16},
        {"shape": (1, 3)},
        {"new": 1},
    ):
        assert checks.check_with_cache(path, FACTS | changed_facts, other_check) == other_check.return_value
    assert other_check.call_count == 4
    assert checks.check_with_cache(path, FACTS, check) == GOOD
    assert check.call_count == 1


def test_a_fatal_result_is_never_kept(tmp_path: Path) -> None:
    path = tmp_path / "preflight.json"
    bad = Mock(return_value=[*GOOD, CheckFinding("c", False, "broken", True)])
    checks.check_with_cache(path, FACTS, bad)
    checks.check_with_cache(path, FACTS, bad)
    assert bad.call_count == 2
    assert not path.exists()


def test_a_file_that_is_torn_or_of_another_version_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, check = tmp_path / "preflight.json", Mock(return_value=GOOD)
    checks.check_with_cache(path, FACTS, check)
    original_text = path.read_text()
    entries = json.loads(original_text)
    entries["found"] = {key: [{"check": "a"}] for key in entries["found"]}
    torn_texts = [original_text[:-9], "", "[]", '{"version": 1}', '{"version": 1, "found": []}']
    for text in [*torn_texts, json.dumps(entries)]:
        path.write_text(text)
        runs = check.call_count
        assert checks.check_with_cache(path, FACTS, check) == GOOD
        assert check.call_count == runs + 1
        assert path.read_text() == original_text
    monkeypatch.setattr(checks, "_CACHE_VERSION", 2)
    checks.check_with_cache(path, FACTS, check)
    assert check.call_count == runs + 2
