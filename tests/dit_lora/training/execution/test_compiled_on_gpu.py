"""Blocks on a GPU are traced in one graph: tensors without values say that they are there, and no GPU need be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_checks import by, fuse_all
from tiny_steps import TinyStep, tiny_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from dit_lora.fuse import api, attention
from dit_lora.numerics.transformer_blocks import repeated_blocks

IN_FP8 = "_dit_lora_fp8"
MASKED = ("sana-1.5", "latte")
"""Whose attention to text takes a mask."""


class _TracedError(Exception):
    """Raised in place of running a graph whose tensors have no values."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was traced is dropped before and after; before, ops run their references."""
    torch._dynamo.reset()
    with by("reference", monkeypatch):
        yield
    torch._dynamo.reset()


def fused_step(paths: dict[str, Path], variant: str) -> TinyStep:
    """A step of a fused model; a mask leaves out the second sample's last tokens."""
    step = tiny_step(paths, variant, dropout=0.1)
    fuse_all(step.transformer)
    for name, tensor in step.batch.items():
        if "mask" in name:
            tensor[1, -2:] = 0
    return step


def block_call(step: TinyStep, patch: pytest.MonkeyPatch, *, masked: bool) -> tuple[Any, Any, Any]:
    """The first block that attends with a mask, or else the second block, with the arguments that a step gives it."""
    calls: list[tuple[Any, Any, Any]] = []
    graph_counts: list[int] = []
    attend = attention.attend

    def noting(*given: Any) -> Any:
        if given[3] is not None:
            graph_counts.append(len(calls) - 1)
        return attend(*given)

    def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((block, args, kwargs))

    patch.setattr(attention, "attend", noting)
    hooks = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in repeated_blocks(step.transformer)]
    step.loss()
    for handle in hooks:
        handle.remove()
    patch.setattr(attention, "attend", attend)
    assert bool(graph_counts) == masked
    return calls[graph_counts[0] if masked else 1]


def on_a_gpu(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move the block and its arguments to fake tensors on a GPU that need not exist, in bf16 except for adapters."""

    def narrow(tensor: torch.Tensor) -> torch.dtype:
        return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype

    def alike(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return torch.empty(value.shape, dtype=value.dtype, device="cuda") if is_tensor else value

    def without_values(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = torch.empty(value.shape, dtype=narrow(value), device="cuda")
        return fake.requires_grad_(value.requires_grad)

    with FakeTensorMode():
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                dtype = torch.float32 if weight.requires_grad else narrow(weight)
                fake = torch.empty(weight.shape, dtype=dtype, device="cuda")
                module._parameters[name] = nn.Parameter(fake, requires_grad=weight.requires_grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = without_values(buffer)
            if IN_FP8 in module.__dict__:
                module.__dict__[IN_FP8] = tree_map(alike, module.__dict__[IN_FP8])
        return tree_map(without_values, (args, kwargs))


def traced(block: nn.Module, args: Any, kwargs: Any) -> list[torch.fx.Node]:
    """Every node of the block's one graph, those of the graphs inside of it too; all are on the GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)

        def run(*_: Any) -> Any:
            raise _TracedError

        return run

    args, kwargs = on_a_gpu(block, args, kwargs)
    block.compile(fullgraph=True, backend=backend, dynamic=False)
    with pytest.raises(_TracedError):
        block(*args, **kwargs)
    (graph,) = graphs
    inner = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for module in inner for node in module.graph.nodes]
    values = [node.meta.get("example_value") for node in nodes]
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cuda"}
    return nodes


needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None,
    reason="torch's CPU build cannot index a tensor that says it is on a GPU, with values or without",
)


@needs_cuda_build
@pytest.mark.parametrize("variant", ["cogvideox-5b", "dit-tiny", "video-dit-text", *MASKED])
def test_no_graph_breaks_where_tensors_are_on_a_gpu(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """A block on tensors without values whose device is a GPU: branches on it are taken.

    Dynamo traces the ops' backward with them. Autograd would run the graph's own, and asks the GPU for a stream.
    """
    step = fused_step(tiny_checkpoints, variant)
    assert traced(*block_call(step, monkeypatch, masked=variant in MASKED))


@needs_cuda_build
def test_a_gpus_products_in_fp8_are_in_the_graph(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch checks the shapes, strides, dtypes and scales of what a GPU would be given."""
    monkeypatch.setattr(api, "why_no_fp8", lambda: None)
    step = tiny_step(tiny_checkpoints, "cogvideox-5b", mixed="bf16")
    api.fuse(step.transformer, {"fp8": "on", "lora_linear": "on"}, check=False)
    nodes = traced(*block_call(step, monkeypatch, masked=False))
    products = [node for node in nodes if node.target is torch._scaled_mm]
    assert len(products) == 4 * 2  # q, k, v and the output, forward and backward
