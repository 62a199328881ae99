"""Liger's kernels in language models: the stock model's values and gradients, in Triton's interpreter and fp32.

What only a GPU can show: bf16 (the interpreter computes on its bits), speed, and the kernels for 32,768 rows or more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny_chat_models as tiny
import torch
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora.errors import DitLoraError
from dit_lora.families.answer_losses import add_answer_losses
from dit_lora.fuse import api, first_forward, liger
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.patches import OPS, get_fusion
from dit_lora.guard.comparison.block_parity import ComparisonOptions
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks
from dit_lora_kernels import triton_support

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
interpreted = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFF = dict.fromkeys(OPS, "off")
ON = OFF | {"liger": "on"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as they are; else in Triton's interpreter, with floats and 1/sqrt as a GPU has them."""
    if DEVICE == "cuda":
        return
    if triton_support().mode != "interpreter":
        pytest.skip("neither a GPU nor TRITON_INTERPRET=1")
    import numpy as np
    import triton
    import triton.language as tl

    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter cannot loop to a loaded number with NumPy 2.4 (its issue 9171)")
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1 / tl.sqrt(x))  # CUDA has its own
    monkeypatch.setattr(liger, "_SUPPORTED_DEVICES", ("cpu", "cuda"))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=True)


def in_fp64(
    function: Callable[..., Any], inputs: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, and gradients of their weighed sum, of the same numbers."""
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return results(function, exact_inputs, [weight.double() for weight in weights])


def results(
    function: Callable[..., Any], inputs: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    returned = function(*inputs)
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    loss = sum(((o * w).sum() for o, w in zip(outputs, weights, strict=True)), torch.zeros(()))
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def assert_right(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """fp32 sums of at most 48 terms."""
    for actual, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


@interpreted
@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 48)])
def test_the_norm_is_that_of_fp64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs, weights = [drawn(*shape), drawn(shape[-1])], [drawn(*shape).detach()]
    originals = [tensor.detach().clone() for tensor in (*inputs, *weights)]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.dit_lora.liger_rms_norm(x, weight, 1e-5)[0]

    assert_right(results(norm, inputs, weights), in_fp64(rms_norm, inputs, weights))
    for tensor, before in zip((*inputs, *weights), originals, strict=True):
        assert torch.equal(tensor, before)


@interpreted
def test_the_product_is_that_of_fp64_and_leaves_its_operands_alone() -> None:
    """Liger's own autograd function writes the gradients over them."""
    torch.manual_seed(0)
    both = drawn(2, 3, 2 * 11)
    weights = [drawn(2, 3, 11).detach()]

    def product(both: torch.Tensor) -> torch.Tensor:
        return liger.apply_swiglu(*both.chunk(2, dim=-1))  # as Phi-3's, in rows of both

    def stock(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    before = both.detach().clone()
    assert_right(results(product, [both], weights), in_fp64(stock, [both], weights))
    gate, up = drawn(4, 11), drawn(4, 11)
    originals = [gate.detach().clone(), up.detach().clone()]
    output = liger.apply_swiglu(gate, up)
    twice = [torch.autograd.grad(output.sum(), (gate, up), retain_graph=True) for _ in range(2)]
    torch.testing.assert_close(*twice, rtol=0, atol=0)
    assert torch.equal(both, before)
    assert all(torch.equal(t, b) for t, b in zip((gate, up), originals, strict=True))


@interpreted
@pytest.mark.parametrize("turned", [8, 6])
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_the_rotation_is_that_of_fp64(turned: int, order: str) -> None:
    """Of all channels or, in Phi-3 small, of the first of them; for positions of each sample's own."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    torch.manual_seed(0)
    query, key = drawn(2, 5, 3, 8), drawn(2, 5, 1, 8)
    angles = torch.rand(2, 5, turned // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(function: Callable[..., Any], *tables: torch.Tensor) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor) -> Any:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            if order == "heads first":
                q, k = q.contiguous(), k.contiguous()
            return function(q, k, *(table.to(q.dtype) for table in tables))

        return run

    def fused(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> Any:
        return liger._rotate(apply_rotary_pos_emb, q, k, *tables)

    weights = [drawn(2, 3, 5, 8).detach(), drawn(2, 1, 5, 8).detach()]
    before = query.detach().clone(), key.detach().clone()
    actual = results(rotate(fused, cos, sin), [query, key], weights)
    assert_right(actual, in_fp64(rotate(apply_rotary_pos_emb, cos, sin), [query, key], weights))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@interpreted
def test_torch_finds_the_ops_right() -> None:
    """Their fakes, and that no operand is changed."""
    torch.manual_seed(0)
    q, k = (drawn(1, 3, heads, 4).transpose(1, 2) for heads in (2, 1))
    table = torch.rand(1, 3, 4, device=DEVICE)
    ops = torch.ops.dit_lora
    for op, args in (
        (ops.liger_rms_norm, (drawn(3, 5), drawn(5), 1e-5)),
        (ops.liger_swiglu, (drawn(3, 5), drawn(3, 5))),
        (ops.liger_rotation, (q, k, table, table, False)),
    ):
        torch.library.opcheck(
            op.default,
            args,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def small(config: str, model: str, **changes: Any) -> nn.Module:
    """One layer of any of them, with norms that are not one."""
    import transformers

    values = {**tiny.TEXT, "num_hidden_layers": 1, **changes}
    torch.manual_seed(0)
    transformer = getattr(transformers, model)(getattr(transformers, config)(**values))
    for name, parameter in transformer.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return transformer.to(DEVICE).eval()


SMALL: dict[str, Callable[[], nn.Module]] = {
    "mistral": lambda: small("MistralConfig", "MistralForCausalLM", head_dim=8),
    "llama": lambda: small("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": lambda: small("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": lambda: small("Qwen3Config", "Qwen3ForCausalLM", head_dim=8),
    "phi3": lambda: small("Phi3Config", "Phi3ForCausalLM"),
}
BATCH = {
    "input_ids": torch.tensor([[5, 9, 11, 3], [7, 7, 20, 0]], device=DEVICE),
    "answer_positions": torch.tensor([[1, 2], [1, 0]], device=DEVICE),
    "answer_labels": torch.tensor([[11, 3], [20, -100]], device=DEVICE),
}


class Calls(TorchDispatchMode):
    """The names of the ops that ran; torch 2.15's profiler does not list all that are written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    losses = model(**BATCH)
    (losses * torch.tensor([0.3, 1.7], device=DEVICE)).sum().backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"losses": losses.detach(), **actual}


@interpreted
@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_the_stock_one_and_given_back_bit_for_bit(name: str) -> None:
    """Trained norms and adapters on gate, up and down get their gradients."""
    model: Any = add_answer_losses(SMALL[name]())
    model.requires_grad_(False)
    targets = ["gate_up_proj" if name == "phi3" else "gate_proj", "down_proj", "o_proj"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    for parameter, tensor in model.named_parameters():
        if "norm" in parameter:
            tensor.requires_grad_()
    expected_grads = gradients(model)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    report = fuse(model, ON, check=False)
    assert report.ops == ["liger"]
    norms = 5 if name == "qwen3" else 3
    assert len(get_fusion(model).patched_modules) == norms + 2
    with Calls() as ran:
        actual = gradients(model)
    for op in ("rms_norm", "swiglu", "rotation"):
        assert f"dit_lora::liger_{op}" in ran.names, op
    assert sum("norm" in parameter for parameter in actual) == norms
    assert actual.keys() == expected_grads.keys()
    for parameter, tensor in expected_grads.items():
        torch.testing.assert_close(actual[parameter], tensor, rtol=1e-4, atol=1e-5, msg=parameter)
    with find_fallback(list_model_fallbacks(model), "liger").disable_temporarily():
        stock = gradients(model)
    unfuse(model)
    for repeated in (stock, gradients(model)):
        assert all(torch.equal(repeated[n], tensor) for n, tensor in expected_grads.items())
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[n], tensor) for n, tensor in state.items())
    assert not any("forward" in m.__dict__ for m in model.modules() if m is not model)


@interpreted
def test_the_first_training_forward_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the interpreter, the passes that ask whether a kernel repeats itself take most of the time.
    monkeypatch.setattr(first_forward, "ComparisonOptions", partial(ComparisonOptions, min_passes=2))
    model = add_answer_losses(SMALL["llama"]())
    fuse(model, ON)
    gradients(model)
    assert get_fusion(model).is_on("liger")
    unfuse(model)
    monkeypatch.setattr(liger, "apply_swiglu", lambda gate, up: F.silu(gate[:1]) * up)
    fuse(model, ON)
    with pytest.raises(DitLoraError, match=r"kernel liger differs from its reference at .*mlp"):
        gradients(model)


@interpreted
def test_another_model_of_the_class_keeps_its_own_code() -> None:
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb
    model, other_model = (add_answer_losses(SMALL["llama"]()) for _ in range(2))
    expected_grads = gradients(other_model)
    fuse(model, ON, check=False)
    gradients(model)
    assert modeling_llama.apply_rotary_pos_emb is before
    assert all(torch.equal(tensor, expected_grads[n]) for n, tensor in gradients(other_model).items())
    assert get_fusion(other_model) is None


@interpreted
def test_it_runs_on_tensors_without_values() -> None:
    """As the count of activations does."""
    model = add_answer_losses(SMALL["mistral"]())
    fuse(model, ON, check=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        weights = {n: fake.from_tensor(t) for n, t in model.state_dict(keep_vars=True).items()}
    losses = torch.func.functional_call(model, weights, kwargs=BATCH)
    losses.sum().backward()
    assert losses.shape == (2,)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4)),  # a trained norm under autocast
        (torch.ones(0, 4), torch.ones(4)),
        (torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)),
    ],
)
def test_what_it_cannot_take_runs_the_stock_code(inputs: tuple[torch.Tensor, ...]) -> None:
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm

    x, weight = inputs
    norm = MistralRMSNorm(4)
    norm.weight = nn.Parameter(weight)
    with torch.no_grad():
        actual, expected = liger.norm_forward(norm, x), norm(x)
    assert actual.dtype is expected.dtype
    assert torch.equal(actual, expected)


def test_another_activation_keeps_its_own_code() -> None:
    model = small("LlamaConfig", "LlamaForCausalLM", hidden_act="gelu")
    fuse(model, ON, check=False)
    kept_layers = get_fusion(model).skipped_modules
    assert [(op, name) for op, name, _ in kept_layers] == [("liger", "model.layers.0.mlp")]
    assert "GELU" in kept_layers[0][2]


def test_auto_needs_a_gpu_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SMALL["llama"]()
    if triton_support().mode != "gpu":
        report = fuse(model, OFF | {"liger": "auto"})
        assert report.ops == []
        assert "with `on` it runs in plain PyTorch" in report.unavailable["liger"]
        assert "liger: off" in str(report)
        unfuse(model)
    monkeypatch.setattr(liger, "find_unavailable_reason", lambda: "liger-kernel is not installed")
    assert fuse(model, OFF | {"liger": "auto"}).unavailable["liger"] == "liger-kernel is not installed"
    with pytest.raises(DitLoraError, match=r"kernels.liger: liger-kernel is not installed; pip"):
        fuse(model, ON)


def test_it_is_not_spoken_of_where_it_has_no_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert "liger" not in str(fuse(model))
    assert "liger" not in fuse(model).unavailable
    with pytest.raises(DitLoraError, match="can use liger"):
        fuse(model, {"liger": "on"})
    assert api.OPS[-1] == "liger"
