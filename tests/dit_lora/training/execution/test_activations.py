"""The memory of activations, counted without taking any, and the checkpointing that follows from it."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from launching import ROOT
from tiny_steps import CPU, NETWORKS, VARIANTS, TinyStep, tiny_step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.optim import TrainConfig
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Tensors
from dit_lora.training import choose_checkpointing as choosing
from dit_lora.training.choose_checkpointing import (
    choose_checkpointing,
    count_free_bytes,
    count_unallocated_bytes,
    select_least_memory_advice,
)
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    CheckpointingMode,
    set_checkpointing,
)
from dit_lora.training.execution.activations import (
    MAX_MEMORY_SHARE,
    CheckpointingAdvice,
    PeakBytes,
    advise_checkpointing,
    measure_activations,
)
from dit_lora.training.execution.fake_step import AllocationTracker

GIB = 2**30
# The last block's text is not read, and what it saved is freed before the end of the forward pass.
FREED_SHARES = {"hunyuan-video-1.5": 0.006}
FEW_NETWORKS = ("cogvideox-5b", "dit-tiny", "sana-600m")
NEEDS: PeakBytes = {"none": 90 * GIB, "selective": 18 * GIB, "full": 9 * GIB}


@pytest.fixture(autouse=True)
def uncached_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for a run has none of the facts that a cached count depends on."""
    monkeypatch.setattr("dit_lora.training.choose_checkpointing.build_model_facts", lambda setup: {})
    monkeypatch.setattr(
        "dit_lora.training.choose_checkpointing.get_preflight_cache_path", lambda setup: tmp_path / "preflight.json"
    )


def saved_bytes(step: TinyStep) -> int:
    """What autograd saves of a real forward pass, each storage once, without weights and buffers."""
    model_tensors = [*step.transformer.parameters(), *step.transformer.buffers()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in model_tensors}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda saved: saved):
        step.loss()
    return sum(storage.nbytes() for storage in storages.values())


# In fp32 nothing is cast: three networks of different kinds are enough.
@pytest.mark.parametrize(
    ("variant", "mixed"),
    [
        *(pytest.param(*network.values, "bf16", marks=network.marks) for network in NETWORKS),
        *(
            pytest.param(variant, "no", marks=() if variant in FEW_NETWORKS else pytest.mark.thorough)
            for variant in VARIANTS
        ),
    ],
)
def test_the_count_is_exactly_what_a_real_step_saves(
    tiny_checkpoints: dict[str, Path], variant: str, mixed: str
) -> None:
    """Counted from autograd's saved tensors, and from tensors alive after forward (these and the scalar loss)."""
    step = tiny_step(tiny_checkpoints, variant, mixed=mixed, dropout=0.3)
    needs = measure_activations(step.transformer, step.losses, step.spec, CPU)
    assert needs["none"] == saved_bytes(step)
    model_tensors = [*step.transformer.parameters(), *step.transformer.buffers()]
    with AllocationTracker([*model_tensors, *step.batch.values()]) as live:
        loss = step.loss()
        alive = live.current_bytes - loss.nbytes
    batch = sum(tensor.nbytes for tensor in step.batch.values())  # of which some is saved too
    # Tables that are neither weights nor buffers, such as Qwen-Image's rotations, exist before the step and count.
    attributes = [attribute for module in step.transformer.modules() for attribute in vars(module).values()]
    tables = sum(attribute.nbytes for attribute in attributes if isinstance(attribute, torch.Tensor))
    freed = FREED_SHARES.get(variant, 0.0) * alive
    assert alive <= needs["none"] <= alive + batch + tables + freed


@pytest.mark.parametrize("variant", FEW_NETWORKS)
def test_real_peaks_are_in_the_order_of_the_count(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    step = tiny_step(tiny_checkpoints, variant)
    needs = measure_activations(step.transformer, step.losses, step.spec, CPU)
    peaks = {mode: peak(step, mode) for mode in CHECKPOINTING_MODES}
    assert needs["none"] > needs["selective"] > needs["full"]
    assert peaks["none"] > peaks["selective"] >= peaks["full"]
    for mode in CHECKPOINTING_MODES:
        assert needs[mode] <= peaks[mode] < 1.5 * needs[mode]  # of two blocks, gradients are much


def peak(step: TinyStep, mode: CheckpointingMode) -> int:
    set_checkpointing(step.transformer, mode)
    with AllocationTracker([*step.transformer.parameters(), *step.transformer.buffers()]) as live:
        step.gradients()
    return live.max_bytes


class Block(nn.Module):
    """Saves five tensors: x for silu; y and out, and a logsumexp, for attention; e for exp."""

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor]) -> torch.Tensor:
        y = F.silu(x)
        return F.scaled_dot_product_attention(y, y, y).exp() + tables[0]


class Counted(nn.Module):
    """Three blocks, small enough to count by hand."""

    _supports_gradient_checkpointing = True
    function: Callable[..., Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Buffer(torch.ones(2, 8, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def enable_gradient_checkpointing(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def disable_gradient_checkpointing(self) -> None:
        self.function = None

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x, tables = self.scale * x * self.shift, (2 * table,)
        for block in self.blocks:
            x = self.function(block, x, tables) if self.function else block(x, tables)
        return x.sum()


COUNTED = {"x": (torch.Size((1, 2, 8, 4)), torch.float32), "table": ((8, 4), torch.float32)}


def test_a_count_by_hand() -> None:
    """x is 256 bytes, a logsumexp 64 and the table 128; a buffer is nobody's."""
    model = Counted()
    needs = measure_activations(model, lambda m, batch: m(**batch), COUNTED, CPU)
    gradient_bytes = 256  # for the gradient of `scale`
    assert needs == {
        "none": gradient_bytes + 3 * (4 * 256 + 64),
        "selective": gradient_bytes + 3 * 256 + 128 + 3 * (256 + 64) + 2 * 256,
        "full": gradient_bytes + 3 * 256 + 128 + 3 * 256 + 64,
    }
    assert model.function is None


def test_the_cpu_of_one_rank_among_several_is_the_cpu(tiny_checkpoints: dict[str, Path]) -> None:
    """Accelerate numbers it there."""
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    needs = measure_activations(step.transformer, step.losses, step.spec, CPU)
    assert measure_activations(step.transformer, step.losses, step.spec, torch.device("cpu", 0)) == needs


def test_a_model_without_checkpointing_needs_what_it_needs() -> None:
    model = Counted()
    model._supports_gradient_checkpointing = False
    needs = measure_activations(model, lambda m, batch: m(**batch), COUNTED, CPU)
    assert needs == {"none": 256 + 3 * (4 * 256 + 64)}
    assert advise_checkpointing(needs, 0, "auto").mode == "none"


@pytest.mark.parametrize("variant", ["cogvideox-5b", "video-dit-class", "sana-video"])
def test_counting_leaves_no_trace(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """Not in weights, nor in torch's generator, nor in tables that a model computes once and keeps."""
    counted, reference_step = (tiny_step(tiny_checkpoints, variant, dropout=0.3) for _ in range(2))
    state = torch.get_rng_state()
    before = dict(counted.transformer.named_parameters())
    measure_activations(counted.transformer, counted.losses, counted.spec, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert not counted.transformer.is_gradient_checkpointing
    after = dict(counted.transformer.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(parameter.grad is None for parameter in after.values())
    expected = reference_step.gradients()
    grads = counted.gradients()
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())


def test_cogvideox_5b_is_counted_at_its_real_shape_without_its_weights() -> None:
    """14.3 times the tokens' 109.2 MB a block, in 42 blocks: 61 GiB, as counted before by another way.

    LoRA of rank 64 on q, k, v and out, everything in bf16, 49 frames of 480x720.
    """
    path = ROOT / "tests" / "fixtures" / "configs" / "CogVideoX-5b" / "transformer"
    config = json.loads((path / "config.json").read_text())
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel.from_config(config).requires_grad_(False)
        attach_lora(model, LoraConfig(rank=64), get_family("cogvideox").lora_targets, seed=0)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    shapes = {
        "hidden_states": (1, 13, 16, 60, 90),
        "encoder_hidden_states": (1, 226, 4096),
        "cos": (17550, 64),
        "sin": (17550, 64),
    }

    def forward(model: nn.Module, batch: Tensors) -> torch.Tensor:
        rotary = (batch["cos"].float(), batch["sin"].float())
        states = {name: batch[name] for name in ("hidden_states", "encoder_hidden_states")}
        step = torch.tensor([3])
        return model(**states, timestep=step, image_rotary_emb=rotary, return_dict=False)[0]

    spec = {name: (torch.Size(shape), torch.bfloat16) for name, shape in shapes.items()}
    needs = measure_activations(model, forward, spec, CPU)
    tokens = (226 + 17550) * 3072 * 2
    assert needs["none"] / (42 * tokens) == pytest.approx(14.3, abs=0.15)
    assert needs["none"] / GIB == pytest.approx(61, abs=0.5)
    # A block keeps its input, and attention's output and logsumexp; one block is computed again.
    assert needs["full"] / tokens == pytest.approx(42 * 1.0 + 14.3, abs=2)
    assert needs["selective"] / tokens == pytest.approx(42 * 2.03 + 13.3, abs=2)


@pytest.mark.parametrize(
    ("free", "mode"),
    [
        (90 * GIB / MAX_MEMORY_SHARE, "none"),
        (90 * GIB / MAX_MEMORY_SHARE - 9, "selective"),
        (18 * GIB / MAX_MEMORY_SHARE, "selective"),
        (18 * GIB / MAX_MEMORY_SHARE - 9, "full"),
        (9 * GIB / MAX_MEMORY_SHARE, "full"),
        (0, "full"),
    ],
)
def test_the_least_recomputation_that_fits_is_taken(free: float, mode: CheckpointingMode) -> None:
    advice = advise_checkpointing(NEEDS, round(free), "auto")
    assert advice.mode == mode
    assert advice.fits == (free > 0)


def test_each_shape_gets_its_own() -> None:
    small: PeakBytes = {mode: need // 10 for mode, need in NEEDS.items()}
    decisions = [advise_checkpointing(needs, 30 * GIB, "auto") for needs in (NEEDS, small)]
    assert [advice.mode for advice in decisions] == ["selective", "none"]


def test_where_nothing_fits_the_smallest_is_taken() -> None:
    """A tiny model's blocks can have larger inputs than what they save."""
    advice = advise_checkpointing({"none": 5, "selective": 7, "full": 6}, 1, "auto")
    assert (advice.mode, advice.fits) == ("none", False)


def test_the_advice_says_what_every_mode_needs() -> None:
    chosen = advise_checkpointing(NEEDS, 61 * GIB, "auto")
    assert chosen.message == ("selective: activations need 18 of 61 GiB free (none would need 90, full 9)")
    advice = advise_checkpointing(NEEDS, 61 * GIB, "none")
    assert advice.message == "none: activations need 90 of 61 GiB free (selective would need 18, full 9)"
    assert not advice.fits
    wasteful = advise_checkpointing(NEEDS, 61 * GIB, "full")
    assert (wasteful.mode, wasteful.fits) == ("full", True)
    single = advise_checkpointing({"none": 150 * GIB + 5}, 1234 * GIB, "auto")
    assert single.message == "none: activations need 150 of 1234 GiB free"


def test_all_ranks_follow_the_one_that_must_save_most() -> None:
    none, selective = (
        CheckpointingAdvice("none", "a", True),
        CheckpointingAdvice("selective", "b", True),
    )
    full, short = CheckpointingAdvice("full", "c", True), CheckpointingAdvice("full", "d", False)
    assert select_least_memory_advice([none, none]) is none
    assert select_least_memory_advice([none, selective, none]) is selective
    assert select_least_memory_advice([full, selective, short]) is short
    assert select_least_memory_advice([short, selective, full]) is short


def test_gradients_and_moments_are_counted_until_they_exist() -> None:
    weights = [nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(6))]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights])
    assert count_unallocated_bytes(optimizer) == 16 * 4 * 3 + 2 * 4  # each weight's step count
    (weights[0] * 2).sum().backward()
    assert count_unallocated_bytes(optimizer) == 16 * 4 * 3 - 10 * 4 + 2 * 4
    optimizer.step()
    assert count_unallocated_bytes(optimizer) == 6 * 4 * 3 + 4
    optimizer.zero_grad()
    assert count_unallocated_bytes(optimizer) == 6 * 4 * 3 + 10 * 4 + 4


def stand_in(step: TinyStep, asked: str) -> tuple[Any, list[str]]:
    """What of a run the choice looks at, and what it says."""
    messages: list[str] = []
    specs = {name: (shape[1:], dtype) for name, (shape, dtype) in step.spec.items()}
    trained = [p for p in step.transformer.parameters() if p.requires_grad]
    train = TrainConfig(steps=1, checkpointing=asked, batch_size=2, seed=0)
    run = SimpleNamespace(
        recipe=SimpleNamespace(
            train=train, optim=SimpleNamespace(name="adamw"), guard=SimpleNamespace(preflight="anew")
        ),
        task=SimpleNamespace(trajectory_config=lambda recipe: {}),
        engine=SimpleNamespace(in_flight_bytes=0, enable_local_forward=nullcontext),
        session=SimpleNamespace(say=messages.append),
        accelerator=SimpleNamespace(device=CPU, num_processes=1),
        data=SimpleNamespace(training_set=SimpleNamespace(largest_shape=(None, specs), integer_inputs=dict)),
        checkpoint=step.checkpoint,
        transformer=step.transformer,
        optimizer=torch.optim.AdamW(trained),
    )
    return run, messages


def is_set(step: TinyStep) -> str:
    """The mode of the model."""
    blocks: Any = step.transformer
    if not blocks.is_gradient_checkpointing:
        return "none"
    return "selective" if "_selectively" in str(blocks._gradient_checkpointing_func) else "full"


@pytest.mark.parametrize("expected", CHECKPOINTING_MODES)
def test_a_run_takes_what_its_free_memory_allows(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, expected: CheckpointingMode
) -> None:
    step = tiny_step(tiny_checkpoints, "cogvideox-2b")
    needs = measure_activations(step.transformer, step.losses, step.spec, CPU)
    run, messages = stand_in(step, "auto")
    step.transformer.eval()
    free = int(needs[expected] / MAX_MEMORY_SHARE + 1)
    for _ in range(2):  # once more, from the mode that it set
        choose_checkpointing(run, lambda _setup: free)
        assert is_set(step) == expected
        assert step.transformer.training
    # Nothing is said if nothing is computed twice.
    assert len(messages) == (0 if expected == "none" else 2)
    assert all(message.startswith(f"checkpointing: {expected}: activations need 0.00") for message in messages)


def test_an_explicit_mode_is_taken_and_what_will_not_fit_is_said(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    for mode in CHECKPOINTING_MODES:
        run, messages = stand_in(step, mode)
        choose_checkpointing(run)
        assert is_set(step) == mode
        expected = [] if mode == "none" else [f"checkpointing: {mode}"]
        assert [line.partition(": act")[0] for line in messages] == expected
    for mode, hint in (("none", True), ("auto", False)):
        run, messages = stand_in(step, mode)
        choose_checkpointing(run, lambda _setup: 100)
        assert is_set(step) == ("none" if mode == "none" else "full")
        assert messages[1].startswith("warning: activations may not fit")
        assert ("train.checkpointing=auto" in messages[1]) == hint


def test_another_ranks_advice_is_followed(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    theirs = CheckpointingAdvice("selective", "selective: theirs", True)
    monkeypatch.setattr(choosing, "gather_object", lambda own: [*own, theirs])
    run, messages = stand_in(step, "auto")
    choose_checkpointing(run)
    assert is_set(step) == "selective"
    assert messages == ["checkpointing: selective: theirs"]


def test_a_forward_that_cannot_be_counted_is_said(tiny_checkpoints: dict[str, Path]) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    reads = lambda _model, batch, _streams: batch["latent_mean"].sum().item()  # noqa: E731
    mismatch = lambda *_: int("media tokens")  # noqa: E731  # ValueError
    for requested_mode, chosen_mode, losses in (
        ("auto", "full", reads),
        ("none", "none", mismatch),
    ):
        run, messages = stand_in(step, requested_mode)
        run.checkpoint = SimpleNamespace(losses=losses)
        choose_checkpointing(run)
        assert is_set(step) == chosen_mode
        assert messages[0].startswith(f"checkpointing: {chosen_mode}: activations could not be counted: ")
        assert "\n" not in messages[0]


def test_a_model_without_checkpointing_is_refused_before_it_is_counted(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    monkeypatch.setattr(type(step.transformer), "_supports_gradient_checkpointing", False)
    run, messages = stand_in(step, "selective")
    with pytest.raises(DitLoraError, match="DiTTransformer2DModel has no gradient checkpointing"):
        choose_checkpointing(run)
    assert messages == []
    run, messages = stand_in(step, "auto")
    choose_checkpointing(run)
    assert messages == []


def test_free_memory_is_shared_by_the_processes_of_a_cpu(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=40 * GIB))
    run, _ = stand_in(step, "auto")
    run.accelerator.num_processes = 4
    assert count_free_bytes(run) == 10 * GIB - count_unallocated_bytes(run.optimizer)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8))
    assert count_free_bytes(run) == 0


def test_free_memory_of_a_gpu_is_the_drivers_and_the_allocators(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    run, _ = stand_in(step, "auto")
    run.accelerator.device = torch.device("cuda")
    run.accelerator.num_processes = 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 11 * GIB)
    assert count_free_bytes(run) == 31 * GIB - count_unallocated_bytes(run.optimizer)
