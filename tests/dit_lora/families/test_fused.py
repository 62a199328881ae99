"""The contract with fused kernels, over every family and tiny variant: the same model, in less memory."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_cases.subject import Subject, adapted, encoded_batch, stock_pipeline
from fuse_checks import Values, assert_equal, by, fuse_all
from kernel_checks import saved_bytes
from torch import nn

from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.adapters.load import load_adapter
from dit_lora.fuse.api import unfuse
from dit_lora.fuse.patches import get_fusion
from dit_lora.guard.comparison.block_parity import ComparisonOptions, record_grad_flags
from dit_lora.guard.comparison.parity import find_first_difference
from dit_lora.guard.fallbacks import list_model_fallbacks
from dit_lora.numerics.saturation import has_fp16_saturation
from dit_lora.numerics.streams import RandomStreams


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quick on a CPU; each model's own test runs the kernels."""
    with by("reference", monkeypatch):
        yield


def losses(subject: Subject, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return subject.checkpoint.denoiser.losses(model, batch, RandomStreams(0, [0, 1, 2])).losses


def run(subject: Subject, model: nn.Module, batch: dict[str, torch.Tensor]) -> Values:
    """Losses of three different samples, and every gradient."""
    loss = losses(subject, model, batch)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    weights = torch.tensor([1.0, -0.7, 2.3])
    gradients = torch.autograd.grad((loss * weights).sum(), [*trained.values()])
    return {"losses": loss.detach(), **dict(zip(trained, gradients, strict=True))}


def test_fused_it_is_the_same_model_and_undone_the_same_bits(fusible_subject: Subject) -> None:
    model, batch = adapted(fusible_subject).train(), encoded_batch(fusible_subject)
    expected, emulated = run(fusible_subject, model, batch), has_fp16_saturation(model)
    names = list(model.state_dict())
    fuse_all(model)
    assert set(get_fusion(model).get_active_ops()) == fusible_subject.case.takes, get_fusion(model).format_lines()
    assert_equal(run(fusible_subject, model, batch), expected, fusible_subject.case.fused_tolerance)
    assert list(model.state_dict()) == names
    assert has_fp16_saturation(model) == emulated
    unfuse(model)
    assert_equal(run(fusible_subject, model, batch), expected, 0.0)
    assert has_fp16_saturation(model) == emulated


# Blocks in bf16 are compared in fp32 too.
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def test_every_kernel_holds_parity_on_the_familys_own_batch(compared_subject: Subject, dtype: torch.dtype) -> None:
    """As preflight asks before a run: each op off alone, and all at once, against what is on."""
    model = fuse_all(adapted(compared_subject)).train()
    # Two samples are enough to find a row that was taken from another sample.
    batch = {name: tensor[:2] for name, tensor in encoded_batch(compared_subject).items()}
    in_policy(model, dtype)
    switches = [switch for switch in list_model_fallbacks(model) if switch.name != "compile"]
    assert len(switches) >= 2

    def forward() -> torch.Tensor:
        return compared_subject.checkpoint.denoiser.losses(model, batch, RandomStreams(0, [0, 1])).losses

    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        with record_grad_flags(model) as learning:
            forward()
        # That kernels repeat themselves, which takes many passes, is asked of each of them elsewhere.
        settings = ComparisonOptions(grad_flags=learning, min_passes=2)
        for switch in switches:
            difference = find_first_difference(switch, forward, model, options=settings)
            assert difference is None, difference


def in_policy(model: nn.Module, dtype: torch.dtype) -> None:
    """The base in this dtype, what trains in fp32."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@pytest.mark.thorough  # every fused model's own test asks it in CI: tests/fuse_contract.py
def test_it_keeps_less_for_backward_under_the_policys_autocast(model_subject: Subject) -> None:
    model, batch = adapted(model_subject).train(), encoded_batch(model_subject)
    in_policy(model, torch.bfloat16)
    excluded = [*model.parameters(), *model.buffers(), *batch.values()]

    def kept() -> int:
        with torch.autocast("cpu", torch.bfloat16):
            return saved_bytes(lambda: losses(model_subject, model, batch), excluded)

    stock = kept()
    fuse_all(model)
    # A family without other ops saves only what `lora_linear` does, of a call for each sample in some. Most of what
    # Anima keeps is of 512 rows of text.
    assert kept() < (0.9 if len(model_subject.case.takes) > 1 else 0.98) * stock


@pytest.mark.thorough  # every fused model's own test asks it in CI: tests/fuse_contract.py
def test_checkpointing_recomputes_the_same_bits(model_subject: Subject) -> None:
    model, batch = fuse_all(adapted(model_subject)).train(), encoded_batch(model_subject)
    expected = run(model_subject, model, batch)
    model.enable_gradient_checkpointing()
    assert_equal(run(model_subject, model, batch), expected, 0.0)


def test_an_adapter_trained_fused_works_in_the_stock_pipeline(model_subject: Subject, tmp_path: Path) -> None:
    model, batch = fuse_all(adapted(model_subject)), encoded_batch(model_subject)
    part = model_subject.case.part
    save_adapter(model, model_subject.checkpoint.info.pipeline_class, tmp_path, {"part": part})
    pipeline = stock_pipeline(model_subject)
    load_adapter(pipeline, tmp_path)
    with torch.no_grad():
        trained = losses(model_subject, model.eval(), batch)
        loaded = losses(model_subject, getattr(pipeline, part).eval(), batch)
    torch.testing.assert_close(trained, loaded, rtol=1e-5, atol=0)


@pytest.mark.thorough  # every fused model's own test asks it in CI: tests/fuse_contract.py
def test_a_copy_is_fused_and_its_own(model_subject: Subject) -> None:
    model, batch = fuse_all(adapted(model_subject)).train(), encoded_batch(model_subject)
    expected = run(model_subject, model, batch)
    second_model = copy.deepcopy(model)
    unfuse(model)
    assert_equal(run(model_subject, second_model, batch), expected, 0.0)
