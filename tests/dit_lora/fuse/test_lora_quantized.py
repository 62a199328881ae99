"""LoRA on bitsandbytes' NF4, FP4 and int8 layers with lora_linear: bitsandbytes still computes the base's product."""

import copy

import peft
import pytest
import torch
from torch import Tensor, nn

from dit_lora.fuse import lora
from dit_lora.fuse.patches import FusedModelState, patch_forward
from dit_lora.fuse.registry import FORWARDS

bnb = pytest.importorskip("bitsandbytes")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["nf4", "fp4", "int8"]


class Projections(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype, width: int = 64) -> None:
        super().__init__()
        if kind == "int8":
            layers = [bnb.nn.Linear8bitLt(width, n, has_fp16_weights=False) for n in (64, 128)]
            self.is_loaded_in_8bit = True
        else:
            layers = [bnb.nn.Linear4bit(width, n, compute_dtype=dtype, quant_type=kind) for n in (64, 128)]
            self.is_loaded_in_4bit = True
        for layer in layers:
            layer.load_state_dict(nn.Linear(width, layer.out_features).state_dict())
        self.k, self.v = layers

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(x), self.v(x)


def build(kind: str, dtype: torch.dtype) -> Projections:
    torch.manual_seed(0)
    model = Projections(kind, dtype).to(DEVICE)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["k", "v"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


def fused(model: Projections) -> FusedModelState:
    fusion = FusedModelState({lora.OP: True})
    for name in ("k", "v"):
        layer = getattr(model, name)
        (patch,) = [p for p in FORWARDS if p.target_class == f"peft.tuners.lora.bnb.{type(layer).__name__}"]
        patch_forward(name, layer, fusion, patch)
    return fusion


def exact(model: Projections, x: Tensor) -> list[Tensor]:
    """In fp64, of the weights as bitsandbytes gives them back."""
    outputs = []
    for layer in (model.k, model.v):
        base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
        weight = lora._dequantize(base, torch.float32)
        y = nn.functional.linear(x, weight.double(), base.bias.double())
        delta = nn.functional.linear(x, a.weight.double())
        outputs.append(y + nn.functional.linear(delta, b.weight.double()) * 1.5)
    return outputs


def step(model: Projections, x: Tensor, outputs: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = sum((y.double().square().sum() for y in outputs), torch.zeros(()))
    return [*outputs, *torch.autograd.grad(loss, [x, *trained])]


def worst(values: list[Tensor], trues: list[Tensor]) -> float:
    pairs = zip(values, trues, strict=True)
    return max(((v.double() - t).norm() / t.norm()).item() for v, t in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_layers(kind: str, dtype: torch.dtype, shared: bool) -> None:
    """As near to fp64 as PEFT's, values and gradients."""
    model = build(kind, dtype)
    stock = copy.deepcopy(model)
    assert fused(model).skipped_modules == []
    x = torch.randn(2, 7, 64, device=DEVICE).to(dtype).requires_grad_()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not torch.float32):
        ours = step(model, x, lora.project_linear_layers((model.k, model.v), x) if shared else model(x))
        theirs = step(stock, x, stock(x))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    exact_x = x.detach().double().requires_grad_()
    exact_results = step(model, exact_x, exact(model, exact_x))
    unit = torch.finfo(dtype).eps
    assert worst(ours, exact_results) <= 1.25 * worst(theirs, exact_results) + unit
    # int8 on a GPU rounds its inputs too.
    assert worst(ours, exact_results) < (0.05 if DEVICE == "cuda" and kind == "int8" else 4 * unit)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_and_no_gradient(kind: str) -> None:
    model = build(kind, torch.bfloat16)
    fused(model)
    x = torch.randn(0, 64, device=DEVICE, dtype=torch.bfloat16)
    assert [y.shape for y in lora.project_linear_layers((model.k, model.v), x)] == [(0, 64), (0, 128)]
    x = torch.randn(3, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        assert [y.shape for y in model(x)] == [(3, 64), (3, 128)]


def test_what_is_not_the_plain_case() -> None:
    merged = build("nf4", torch.float32).k
    merged.merge()
    assert lora.find_lora_problem(merged) == "its adapter is merged"
    dequantized = build("nf4", torch.float32).k
    del dequantized.base_layer.weight.quant_state
    dequantized.base_layer.weight.quant_state = None
    assert lora.find_lora_problem(dequantized) == "its base is not quantized, or transposed"
    sixteen = build("int8", torch.float32).k
    sixteen.base_layer.state.has_fp16_weights = True
    assert lora.find_lora_problem(sixteen) == "its int8 base keeps 16-bit weights"
    trained = build("int8", torch.float32).k
    trained.base_layer.bias.requires_grad_()
    assert lora.find_lora_problem(trained) == "its base is trained"


@pytest.mark.skipif(DEVICE == "cuda", reason="of CPUs")
def test_a_weight_that_bitsandbytes_packs_for_inference_is_left_to_it() -> None:
    """In eval mode on a CPU with bf16 instructions; its own backward pass cannot read that either."""
    layer = build("nf4", torch.bfloat16).k
    layer.base_layer.support_avx512bf16_for_cpu = True
    assert lora.find_lora_problem(layer) is None
    layer.eval()
    assert lora.find_lora_problem(layer) == "its base is packed for inference on a CPU"
    layer.train()
    layer.base_layer.weight.quant_state.packing_format_for_cpu = True
    assert lora.find_lora_problem(layer) == "its base is packed for inference on a CPU"
    layer.base_layer.weight.quant_state.packing_format_for_cpu = False
    layer.base_layer.support_avx512bf16_for_cpu = False
    layer.eval()
    assert lora.find_lora_problem(layer) is None
