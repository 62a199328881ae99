"""Components switched off temporarily are on again afterwards, and the model in fp32 gets its own tensors back."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.compiler.config
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from micro_batches import fake_batch
from torch import nn
from torch.backends import cuda
from torch.nn import functional
from torch.profiler import profile

from dit_lora.errors import DitLoraError
from dit_lora.guard.fallbacks import (
    convert_to_fp32,
    enable_cudnn_unless_masked,
    find_fallback,
    list_attention_fallbacks,
    list_compile_fallbacks,
    preserve_attention_backends,
)
from dit_lora.guard.replay import replay_micro_batch
from dit_lora.numerics.objectives import LossOutput

BACKENDS = ("cudnn", "flash", "efficient")
ALL = "attention:cudnn+flash+efficient"


def enabled() -> tuple[bool, ...]:
    return (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())


def enable(flags: tuple[bool, ...]) -> None:
    for setter, flag in zip(
        (cuda.enable_cudnn_sdp, cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp),
        flags,
        strict=True,
    ):
        setter(flag)


@pytest.fixture(autouse=True)
def every_backend_on() -> Iterator[None]:
    before = enabled()
    enable((True, True, True))
    yield
    enable(before)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_cudnn_attends_on_a_gpu_for_models_without_masks(
    gpu: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for before in (False, True):
        cuda.enable_cudnn_sdp(before)
        enable_cudnn_unless_masked(masked=masked)
        assert cuda.cudnn_sdp_enabled() == (gpu and not masked)


@pytest.mark.parametrize(
    ("on", "names"),
    [
        ((True, True, True), [*(f"attention:{name}" for name in BACKENDS), ALL]),
        (
            (True, False, True),
            ["attention:cudnn", "attention:efficient", "attention:cudnn+efficient"],
        ),
        ((False, True, False), ["attention:flash"]),
        ((False, False, False), []),
    ],
)
def test_backends_that_are_on_are_switches_alone_and_then_together(on: tuple[bool, ...], names: list[str]) -> None:
    enable(on)
    switches = list_attention_fallbacks()
    assert [switch.name for switch in switches] == names
    assert {switch.cause for switch in switches} <= {"attention_backend"}
    assert enabled() == on
    assert cuda.math_sdp_enabled()


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("attention:cudnn", (False, True, True)),
        ("attention:flash", (True, False, True)),
        ("attention:efficient", (True, True, False)),
        (ALL, (False, False, False)),
    ],
)
def test_a_backend_is_off_within_and_on_again_afterwards(name: str, within: tuple[bool, ...]) -> None:
    switch = find_fallback(list_attention_fallbacks(), name)
    with switch.disable_temporarily():
        assert enabled() == within
    assert enabled() == (True, True, True)
    with pytest.raises(RuntimeError, match="out of memory"), switch.disable_temporarily():
        raise RuntimeError("out of memory")
    assert enabled() == (True, True, True)


@pytest.mark.parametrize("name", ["attention:flash", ALL])
def test_a_backend_that_is_turned_off_stays_off(name: str) -> None:
    find_fallback(list_attention_fallbacks(), name).disable()
    assert enabled() == ((True, False, True) if name == "attention:flash" else (False,) * 3)


@pytest.mark.parametrize("tried", ["attention:flash", ALL])
def test_trying_a_switch_again_leaves_a_backend_off_that_was_turned_off(tried: str) -> None:
    switches = list_attention_fallbacks()
    find_fallback(switches, "attention:flash").disable()
    with find_fallback(switches, tried).disable_temporarily():
        pass
    assert enabled() == (True, False, True)


def fail(flags: tuple[bool, ...]) -> None:
    enable(flags)
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("before", [(True, False, True), (False, True, False)])
def test_kept_attention_puts_every_backend_back(before: tuple[bool, ...]) -> None:
    enable(before)
    with preserve_attention_backends():
        enable(tuple(not flag for flag in before))
        assert enabled() != before
    assert enabled() == before
    with pytest.raises(RuntimeError, match="out of memory"), preserve_attention_backends():
        fail(tuple(not flag for flag in before))
    assert enabled() == before


class Attends(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(values, values, values)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_backend_that_is_switched_off_is_off_in_code_that_is_compiled_already(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a cache of graphs knows the code: inductor's has flash attention in it from the first call."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    compiled = torch.compile(Attends(), backend=backend)
    values = torch.randn(2, 4, 16, 32, generator=torch.Generator().manual_seed(0))
    values.requires_grad_()

    def by_flash() -> bool:
        with profile() as profiled:
            compiled(values).sum().backward()
        names = {event.name for event in profiled.events()}
        flash = any("flash_attention_for_cpu" in name for name in names)
        assert flash != ("aten::bmm" in names), "neither flash nor math attended"
        return flash

    flash = find_fallback(list_attention_fallbacks(), "attention:flash")
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        assert by_flash()
        with flash.disable_temporarily():
            assert not by_flash()
            assert torch.compiler.config.cache_key_tag == "the user's no attention:flash"
        assert by_flash()
        assert torch.compiler.config.cache_key_tag == "the user's"
        flash.disable()
        with flash.disable_temporarily():
            assert not by_flash()
        assert not by_flash()
    torch.compiler.reset()


def test_a_switch_is_found_by_its_name_and_an_unknown_one_lists_those_there_are() -> None:
    switches = list_attention_fallbacks()
    assert find_fallback(switches, "attention:flash") is switches[1]
    with pytest.raises(DitLoraError) as error:
        find_fallback(switches, "attention:sage")
    assert "'attention:sage'" in str(error.value)
    assert all(switch.name in str(error.value) for switch in switches)
    with pytest.raises(DitLoraError, match="'attention'"):
        find_fallback(switches, "attention")
    with pytest.raises(DitLoraError, match="components that can be switched off: none on this device"):
        find_fallback([], "compile")


class Block(nn.Module):
    """torch.compile does not change torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values) * 1.5


def spoiling(graph: torch.fx.GraphModule, example: object) -> object:
    """A compiler whose code is wrong."""
    return lambda *args: tuple(value * 100 for value in graph(*args))


@pytest.mark.parametrize("way", ["module.compile", "torch.compile"])
def test_compiled_code_is_left_out_while_compilation_is_switched_off(way: str) -> None:
    block = Block()
    expected = block(torch.eye(6)).detach()
    if way == "module.compile":
        block.compile(backend=spoiling)
        model = nn.Sequential(nn.Identity(), block)
    else:
        model = nn.Sequential(nn.Identity(), torch.compile(block, backend=spoiling))
    (switch,) = list_compile_fallbacks(model)
    assert (switch.name, switch.cause) == ("compile", "kernel")

    def is_right() -> bool:
        return torch.allclose(model(torch.eye(6)), expected)

    try:
        assert not is_right()
        with switch.disable_temporarily():
            assert is_right()
        assert not is_right()
        switch.disable()
        assert is_right()
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


def test_a_model_that_is_not_compiled_has_no_switch_for_it() -> None:
    assert list_compile_fallbacks(nn.Sequential(nn.Linear(6, 4), nn.GELU())) == []


class Net(nn.Module):
    """fp16 weights, fp32 and fp16 buffers, a trained fp32 bias; its product overflows fp16."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.linear = nn.Linear(5, 4, dtype=dtype)
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.full((4,), 3e4, dtype=dtype))
        self.register_buffer("table", torch.randn(7))
        self.register_buffer("order", torch.tensor([6, 5, 4, 3, 2, 1, 0]))
        self.seen: list[torch.dtype] = []

    def forward(self, values: torch.Tensor, ids: torch.Tensor, *, skip: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.linear(values)
        self.seen.append(hidden.dtype)
        assert ids.dtype is torch.int64
        skipped = 0 if skip is None else skip * 3e4
        return hidden * self.scale + self.bias + self.table[self.order[ids]][:, None] + skipped


def given(dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(4)
    return torch.randn(3, 5, generator=draws).to(dtype) * 4, torch.tensor([6, 0, 2])


def tensors_of(model: nn.Module) -> list[tuple[int, torch.dtype, int, torch.Tensor]]:
    """Identity, dtype, address and bits of every tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(t), t.dtype, t.data_ptr(), t.detach().clone()) for t in tensors]


def assert_same_tensors(model: nn.Module, before: list) -> None:
    current_tensors = tensors_of(model)
    assert [entry[:3] for entry in current_tensors] == [entry[:3] for entry in before]
    assert all(torch.equal(current[3], earlier[3]) for current, earlier in zip(current_tensors, before, strict=True))


@pytest.mark.parametrize("raising", [False, True], ids=["returns", "raises"])
def test_an_fp16_overflow_is_finite_in_fp32_and_every_tensor_comes_back(raising: bool) -> None:
    model, (values, ids) = Net(), given()
    before = tensors_of(model)
    assert model(values, ids).isinf().any()
    with ExitStack() as stack:
        if raising:
            stack.enter_context(pytest.raises(RuntimeError, match="out of memory"))
        with convert_to_fp32(model):
            floats = [*model.parameters(), model.scale, model.table]
            assert {tensor.dtype for tensor in floats} == {torch.float32}
            assert model.bias.data_ptr() == before[0][2]  # not copied: it was wide
            output = model(values, ids, skip=values[:, :4])
            output.square().mean().backward()
            if raising:
                raise RuntimeError("out of memory")
    assert output.isfinite().all()
    assert output.dtype is torch.float32
    assert model.seen == [torch.float16, torch.float32]
    assert_same_tensors(model, before)
    assert not model._forward_pre_hooks
    assert model(values, ids).isinf().any()


def test_every_tensor_comes_back_where_the_wide_copy_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, widened = Net(), []
    before = tensors_of(model)

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        widened.append(tensor)
        if len(widened) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensor.to(torch.float32)

    monkeypatch.setattr(torch.Tensor, "float", widen)
    with pytest.raises(torch.OutOfMemoryError), convert_to_fp32(model):
        pytest.fail("the third tensor did not fit")
    assert_same_tensors(model, before)


@pytest.fixture
def bf16() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("raising", [False, True], ids=["returns", "raises"])
def test_the_forward_that_accelerate_wrapped_comes_back(bf16: Accelerator, raising: bool) -> None:
    plain, (values, ids) = Net(torch.float32), given(torch.float32)
    expected = plain(values, ids)
    model = bf16.unwrap_model(bf16.prepare(Net(torch.float32)))
    wrapped, before = model.__dict__["forward"], tensors_of(model)
    with ExitStack() as stack:
        if raising:
            stack.enter_context(pytest.raises(RuntimeError, match="out of memory"))
        with convert_to_fp32(model):
            assert torch.equal(model(values, ids), expected)
            if raising:
                raise RuntimeError("out of memory")
    assert model.__dict__["forward"] is wrapped
    assert_same_tensors(model, before)
    assert not torch.equal(model(values, ids), expected)
    assert model.seen == [torch.float32, torch.bfloat16]


class OfLists(nn.Module):
    """Takes a list of samples, as Z-Image's transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, samples: list[torch.Tensor], *, texts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.linear(sample) + text for sample, text in zip(samples, texts, strict=True)]


def test_lists_of_samples_are_widened_too() -> None:
    model, (sample, text) = OfLists(), torch.randn(2, 4).bfloat16()
    with convert_to_fp32(model):
        (output,) = model([sample], texts=[text])
    expected = nn.functional.linear(sample.float(), model.linear.weight.float(), model.linear.bias.float())
    assert output.dtype is torch.float32
    torch.testing.assert_close(output, expected + text.float())
    assert model([sample], texts=[text])[0].dtype is torch.bfloat16


def test_autocast_around_it_is_off_within() -> None:
    model, (values, ids) = Net(torch.float32), given(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with convert_to_fp32(model):
            model(values, ids)
        model(values, ids)
    assert model.seen == [torch.float32, torch.bfloat16]


def test_a_replay_in_fp32_gives_half_precision_gradients_back() -> None:
    model, (values, ids) = Net(torch.bfloat16), given(torch.bfloat16)
    model(values, ids).square().mean().backward()
    gradient = model.linear.weight.grad

    def forward() -> LossOutput:
        return LossOutput(model(values, ids).float().mean(1), torch.tensor([5, 6, 7]))

    batch = fake_batch(("a", "b", "c"), 1, 0, 0, {}, forward, lambda index: batch)
    with convert_to_fp32(model):
        replay_micro_batch(batch, model)
    assert model.linear.weight.grad is gradient
