"""Compiled blocks: as eager ones but for rounding, under checkpointing, hooks, offload and switches."""

import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tiny_steps import CPU, ChatStep, TinyStep, tiny_step
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from torch._inductor.exc import InvalidCxxCompiler

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.guard.fallbacks import (
    COMPILE,
    convert_to_fp32,
    disable_compile,
    find_fallback,
    list_model_fallbacks,
)
from dit_lora.guard.probe import Probe
from dit_lora.numerics.opaque import iterate_called_modules
from dit_lora.numerics.transformer_blocks import repeated_blocks
from dit_lora.training.execution import compiled
from dit_lora.training.execution.activation_checkpointing import set_checkpointing
from dit_lora.training.execution.compiled import compile_blocks
from dit_lora.training.execution.offload import WeightOffloader
from dit_lora.training.tasks.chat.answerer import ChatAnswerGenerator, SampledFrames


class Traced:
    """A backend that runs graphs as they were traced, and counts them and their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.graphs = self.calls = 0
        monkeypatch.setattr(compiled, "_BACKEND", self)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Traced:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and taken back afterwards
    return Traced(monkeypatch)


def accelerator() -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def asked(recipe_values: dict[str, Any]) -> Any:
    recipe_values["train"] |= {"compile": True}
    return parse_recipe(recipe_values, "test")


def compiled_step(
    paths: dict[str, Path], recipe_values: dict[str, Any], **given: Any
) -> tuple[TinyStep, dict[str, torch.Tensor]]:
    """A step with compiled blocks, and its gradients without."""
    step = tiny_step(paths, "cogvideox-5b", scratch={"num_layers": 3}, **given)
    expected = step.gradients()
    compile_blocks(asked(recipe_values), step.transformer, accelerator())
    return step, expected


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-7) for name in expected
    )


def test_blocks_share_what_is_compiled_and_every_other_mode_uses_it_too(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any], traced: Traced
) -> None:
    """Checkpointed, offloaded, observed from outside; what looks inside of a block runs without."""
    step, expected = compiled_step(tiny_checkpoints, recipe_values)
    grads = step.gradients()
    assert same(grads, expected)
    # The first block's input needs no gradient; the others are alike.
    assert (traced.graphs, traced.calls) == (2, 3)
    WeightOffloader(step.transformer, torch.device("cpu"))
    set_checkpointing(step.transformer, "full")
    repeated_grads = step.gradients()
    assert all(torch.equal(repeated_grads[name], grads[name]) for name in grads)
    assert (traced.graphs, traced.calls) == (2, 9)

    parts = {name for name, _ in iterate_called_modules(step.transformer)}
    assert "transformer_blocks.1" in parts
    assert not any(name.startswith("transformer_blocks.1.") for name in parts)
    recorded: list[str] = []
    block = step.transformer.get_submodule("transformer_blocks.1")
    handle = block.register_forward_hook(lambda *_: recorded.append("block"))
    step.loss()
    assert (recorded, traced.graphs, traced.calls) == (["block"], 2, 12)
    handle.remove()

    with disable_compile(step.transformer), Probe(step.transformer).observe_model_ops() as trace:
        assert same(step.gradients(), expected)
    assert trace.origins == []
    with convert_to_fp32(step.transformer):
        step.loss()
    assert traced.calls == 12

    switch = find_fallback(list_model_fallbacks(step.transformer), COMPILE)
    with switch.disable_temporarily():
        assert same(step.gradients(), expected)
    assert traced.calls == 12
    step.loss()
    assert traced.calls == 15
    switch.disable()
    step.loss()
    assert (traced.graphs, traced.calls) == (2, 15)


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        # A first layer, whose input needs no gradient, and the others; twice that of each part of a model.
        ("mistral", 2),
        *[
            pytest.param(name, graphs, marks=pytest.mark.thorough)
            for name, graphs in (("videochat2", 6), ("llava", 8), ("qwen", 10))
        ],
    ],
)
def test_a_chat_model_is_compiled_beneath_its_layers_checkpointing(
    recipe_values: dict[str, Any], traced: Traced, name: str, graphs: int
) -> None:
    """No checkpointing and full use the same graphs; offloaded too. Answering, one token at a time, makes none."""
    step: Any = ChatStep.of(name)
    expected, loss, classes = (
        step.gradients(),
        step.loss(),
        list(map(type, repeated_blocks(step.transformer))),
    )
    compile_blocks(asked(recipe_values), step.transformer, accelerator())
    grads = step.gradients()
    assert same(grads, expected)
    torch.testing.assert_close(step.loss(), loss, rtol=1e-5, atol=0)
    assert traced.graphs == graphs
    assert all(isinstance(b, stock) for b, stock in zip(repeated_blocks(step.transformer), classes, strict=True))
    forward_only = traced.calls // 2
    set_checkpointing(step.transformer, "full")
    WeightOffloader(step.transformer, CPU)
    traced.calls = 0
    repeated_grads = step.gradients()
    assert all(torch.equal(repeated_grads[name], grads[name]) for name in grads)
    assert traced.graphs == graphs
    assert traced.calls > forward_only  # the backward pass computes again, compiled

    asked_to: Any = SimpleNamespace(
        tokenize_conversation=lambda *_, **__: None,
        answer=lambda *_: str(step.transformer.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=3)),
    )
    traced.calls = 0
    ChatAnswerGenerator(asked_to, step.transformer, CPU, torch.float32).generate_answer(SampledFrames("text"), ())
    with find_fallback(list_model_fallbacks(step.transformer), COMPILE).disable_temporarily():
        off = step.gradients()
    assert all(torch.equal(off[name], expected[name]) for name in expected)
    assert (traced.graphs, traced.calls) == (graphs, 0)


@pytest.mark.thorough
def test_each_shape_is_compiled_on_its_own_whatever_came_before(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any], traced: Traced
) -> None:
    step, _ = compiled_step(tiny_checkpoints, recipe_values)
    full_batch = step.batch
    half = {name: tensor[..., : tensor.shape[-1] // 2] for name, tensor in full_batch.items()}
    half["prompt_embeds"] = full_batch["prompt_embeds"]
    for number, batch in enumerate((full_batch, half, full_batch, half)):
        step.batch = batch
        step.loss()
        assert traced.graphs == (2 if number == 0 else 4)


def test_what_cannot_be_compiled_is_one_clear_error(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise NotImplementedError("no such op here\nand more lines")

    monkeypatch.setattr(compiled, "_BACKEND", broken)
    torch._dynamo.reset()
    step, _ = compiled_step(tiny_checkpoints, recipe_values)
    with pytest.raises(DitLoraError, match=r"train.compile: torch .* set it to false$") as error:
        step.loss()
    assert "\n" not in str(error.value)


def test_a_backward_that_cannot_be_compiled_is_known_before_it_is_reached(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise NotImplementedError("no such gradient here")

    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=broken)
    monkeypatch.setattr(compiled, "_BACKEND", backend)
    torch._dynamo.reset()
    step, _ = compiled_step(tiny_checkpoints, recipe_values)
    with pytest.raises(DitLoraError, match=r"train.compile: .*no such gradient here; set it"):
        step.loss()


@pytest.mark.parametrize(
    "raised", [AssertionError("a tracer's own"), AttributeError("'tuple' has no attribute 'pop'")]
)
def test_a_fault_of_the_tracer_is_told_from_the_blocks_own(
    tiny_checkpoints: dict[str, Path],
    recipe_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
) -> None:
    """What eager code raises too is handed on as it is."""

    def compiler(eager_forward: Any, **_: Any) -> Any:
        def forward(*_args: Any, **_kwargs: Any) -> Any:
            raise raised

        return forward

    monkeypatch.setattr(torch, "compile", compiler)
    step, _ = compiled_step(tiny_checkpoints, recipe_values)
    with pytest.raises(DitLoraError, match=rf"cannot compile a block: {type(raised).__name__}: "):
        step.loss()
    block: Any = step.transformer.get_submodule("transformer_blocks.0")
    block.norm1.forward = None
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        step.loss()


def test_a_machine_or_a_launch_that_cannot_is_refused(
    recipe_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asked(recipe_values)

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(compiled, "get_cpp_compiler", missing)
    with pytest.raises(DitLoraError, match=r"train.compile: there is no C.. compiler; install"):
        compile_blocks(recipe, nn.Linear(2, 2), accelerator())
    launched = accelerator()
    monkeypatch.setattr(type(launched), "distributed_type", DistributedType.FSDP)
    with pytest.raises(DitLoraError, match=r"train.compile does not work with FSDP"):
        compile_blocks(recipe, nn.Linear(2, 2), launched)
    recipe_values["train"]["checkpointing"] = "selective"
    with pytest.raises(DitLoraError, match="checkpointing=selective does not work with compile"):
        parse_recipe(recipe_values, "test")


def test_compilers_get_a_path_that_needs_no_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write comes to the folder that was asked for; places whose own names need quotes are passed over."""
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    assert compiled._make_path_without_quotes(tmp_path / "cache" / "compile") == f"{tmp_path}/cache/compile"
    for name in ("my cache", "it's", "Grüße", 'a"b', "$HOME"):
        folder = tmp_path / name / "compile"
        plain = compiled._make_path_without_quotes(folder)
        assert shlex.quote(plain) == plain
        Path(plain, "kernel.so").touch()
        assert (folder / "kernel.so").exists()
    monkeypatch.setattr(compiled, "_FALLBACK_FOLDERS", ())
    with pytest.raises(DitLoraError, match=r"compilers do not accept the path .*my cache.*data\.cache"):
        compiled._make_path_without_quotes(tmp_path / "my cache")
