"""What is measured: an op at a model's shape, its operands, the stock code, ours, and the bytes that ours must move.

Bytes are those of each op's docstring, with tables, statistics and affine weights counted once. u is the activation's
size and N its rows; 2 bytes an element, 4 for tables of rotations, statistics and LoRA's masters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import stock
import torch
from shapes import SHAPES, TINY, Shape
from stock import Operands, Outputs
from torch import Tensor

from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm
from dit_lora_kernels.finite_norm import CHUNK, finite_norms
from dit_lora_kernels.lora_linear import Adapter, Projection, lora_qkv
from dit_lora_kernels.qk_norm_rope import qk_norm_rope
from dit_lora_kernels.relu_linear_attention import relu_linear_attention
from dit_lora_kernels.silu_dwconv_glu import silu_dwconv_glu

Call = Callable[[Operands], Outputs]
E = 2  # bytes of bf16
SCALING = 0.5


@dataclass(frozen=True)
class Traffic:
    """Bytes that ours moves, and how they were counted."""

    forward: int
    backward: int
    formula: str


@dataclass(frozen=True)
class Case:
    """One op at one shape, with random operands on a device."""

    op: str
    shape: str
    given: Operands
    trained: tuple[str, ...]
    """Operands that take a gradient; none: there is no backward."""
    stock: Call
    ours: Call
    traffic: Traffic
    masters: tuple[str, ...] = ()
    """Operands in fp32, in bf16 for the column without autocast."""
    base: Call | None = None
    """Matrix products that any implementation must take, measured as part of the floor."""
    library: tuple[str, Call] | None = None
    channels_first: tuple[str, ...] = field(default=())
    """Operands that the stock code has as (B,C,H,W) in memory."""


class _Maker:
    """Seeded random operands of one case; on the meta device none, to count bytes alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_meta = device.type == "meta"
        self.generator = None if on_meta else torch.Generator(device).manual_seed(0)

    def __call__(self, *size: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device).mul_(std).to(dtype)

    def near_one(self, *size: int) -> Tensor:
        """Return weights of a norm in bf16: near one, as training leaves them, and not all alike."""
        return (1 + 0.2 * self(*size, dtype=torch.float32)).to(torch.bfloat16)


def _ada_norm(name: str, shape: Shape, device: torch.device, *, gated: bool) -> Case:
    """Return a block's first norm or, `gated`, its second, which also adds attention's output."""
    make, b, d = _Maker(device), shape.batch, shape.width
    table = torch.float32 if shape.norm == "fp32" else torch.bfloat16
    given, count = {}, len(shape.tokens)
    for i, tokens in enumerate(shape.tokens):
        given[f"x{i}"] = make(b, tokens, d)
        for key in ("shift", "scale", "gate")[: 3 if gated else 2]:
            given[f"{key}{i}"] = make(b, d, dtype=table, std=0.5)
        if gated:
            given[f"y{i}"] = make(b, tokens, d)
    affine = shape.norm == "affine"
    if affine:
        given |= {"weight": make.near_one(d), "bias": make(d, std=0.2)}
    kind = "layer" if affine else shape.norm

    def ours(given: Operands) -> Outputs:
        fields = ("x", "shift", "scale", "y", "gate")
        streams = [
            AdaNormInputs(*(given.get(f"{key}{i}") for key in fields))  # type: ignore[arg-type]
            for i in range(count)
        ]
        norm = "rms" if kind == "rms" else "layer"
        out, residuals = joint_ada_norm(streams, given.get("weight"), given.get("bias"), norm=norm, eps=shape.norm_eps)
        return (out, *residuals)

    # Forward reads each x and writes out; gated it reads y and writes the sum too. Backward reads the gradients of out
    # and of the other use of x, and x, and writes dx; gated also dy. The module's docstring has the same by passes.
    rows = b * sum(shape.tokens)
    u, row_table = rows * d * E, count * b * d * table.itemsize
    stats = rows * (4 if kind == "rms" else 8)
    forward = (4 if gated else 2) * u + (3 if gated else 2) * row_table + stats + 2 * affine * d * E
    backward = (5 if gated else 4) * u + (2 if gated else 1) * row_table + stats + affine * d * E
    formula = "4u / 5u" if gated else "2u / 4u"
    trained = tuple(f"{key}{i}" for key in ("x", "y")[: 1 + gated] for i in range(count))
    run = partial(stock.ada_norm, norm=kind, eps=shape.norm_eps)
    return Case(
        "ada_norm_gated" if gated else "ada_norm", name, given, trained, run, ours,
        Traffic(forward, backward, f"{formula} + tables + 4 or 8 N"),
        library=None if gated or count > 1 else _liger_norm(kind, shape.norm_eps),
    )  # fmt: skip


def _liger_norm(kind: str, eps: float) -> tuple[str, Call] | None:
    """Return Liger's modulated RMSNorm; None if it is not installed or for a LayerNorm, which Liger does not have."""
    try:
        from liger_kernel.ops import LigerModulatedRMSNormFunction as Function
    except ImportError:
        return None
    if kind != "rms":
        return None

    def call(given: Operands) -> Outputs:
        # "gemma" computes in fp32 throughout and rounds once, as ours does.
        x = given["x0"]
        out = Function.apply(x, None, given["scale0"], given["shift0"], eps, 0.0, "gemma", False)
        return (out, x)

    return "Liger modulated RMSNorm", call


def _qk_norm_rope(name: str, shape: Shape, device: torch.device) -> Case:
    """Return the norm and rotation of q, which k has once more."""
    make, b, tokens, d = _Maker(device), shape.batch, sum(shape.tokens), shape.width
    first, per_head = sum(shape.tokens[:-1]), shape.qk == "layer"
    size = shape.head_dim if per_head else d
    given = {"x": make(b, tokens, d), "weight": make.near_one(size)}
    if per_head:
        given["bias"] = make(size, std=0.2)
    tables = 0
    if shape.rotary:
        width = d if shape.qk == "inner" else shape.head_dim
        if shape.qk == "split":  # (B, S, H, E/2): an angle a pair and head, once
            angles = make(b, tokens, shape.heads, shape.head_dim // 2, dtype=torch.float32, std=3.0)
        else:  # each angle twice
            angles = make(tokens - first, width // 2, dtype=torch.float32, std=3.0).repeat_interleave(2, -1)
        given["cos"], given["sin"] = angles.cos(), angles.sin()
        tables = given["cos"].nbytes + given["sin"].nbytes
    heads, eps = shape.heads, 1e-5 if shape.qk == "inner" else 1e-6

    def ours(given: Operands) -> Outputs:
        out = qk_norm_rope(
            given["x"].unflatten(2, (heads, -1)),
            *(given.get(key) for key in ("weight", "bias", "cos", "sin")),
            norm="layer" if per_head else "rms",
            eps=eps,
            across_heads=not per_head,
            rotation="half" if shape.qk == "split" else "interleaved",
            first=first,
        )
        return (out,)

    # Forward reads x and writes out; backward reads the output and its gradient, and writes dx.
    u = b * tokens * d * E
    rstd = b * tokens * (heads if per_head else 1) * 4
    other = tables + rstd + size * E * (2 if per_head else 1)
    run = partial(stock.qk_norm_rope, kind=shape.qk, heads=heads, first=first, eps=eps)
    return Case(
        "qk_norm_rope", name, given, ("x",), run, ours,
        Traffic(2 * u + other, 3 * u + other, "2u / 3u + tables + rstd, of one of q, k"),
    )  # fmt: skip


def _lora(name: str, shape: Shape, device: torch.device, *, names: str) -> Case:
    """Return adapted square layers on one input, one for each letter of `names`."""
    make, b, d, rank = _Maker(device), shape.batch, shape.width, shape.rank
    tokens, masters = sum(shape.tokens), []
    given = {"x": make(b, tokens, d)}
    for key in names:
        given[f"w{key}"] = make(d, d, std=d**-0.5)
        given[f"bias{key}"] = make(d, std=0.1)
        given[f"a{key}"] = make(rank, d, dtype=torch.float32, std=d**-0.5)
        given[f"b{key}"] = make(d, rank, dtype=torch.float32, std=0.2)
        masters += [f"a{key}", f"b{key}"]

    def ours(given: Operands) -> Outputs:
        projections = [
            Projection(given[f"w{key}"], given[f"bias{key}"],
                       Adapter(given[f"a{key}"], given[f"b{key}"], SCALING))
            for key in names
        ]  # fmt: skip
        return tuple(lora_qkv(given["x"], projections))

    # Beside the base's products: x is read once for all; each y is read and written, and each dy read twice; dx is
    # read and written once.
    x = y = b * tokens * d * E
    forward, backward = x + 2 * len(names) * y, x + 2 * len(names) * y + 2 * x
    return Case(
        "lora_linear" if len(names) == 1 else "lora_qkv", name, given, ("x", *masters),
        partial(stock.lora_projections, names=names, scaling=SCALING), ours,
        Traffic(forward, backward, f"base GEMM + {forward // x}u / base GEMM + {backward // x}u"),
        masters=tuple(masters), base=partial(stock.base_products, names=names),
    )  # fmt: skip


def _linear_attention(name: str, shape: Shape, device: torch.device) -> Case:
    """Return Sana's attention, without a rotation."""
    make, (tokens,) = _Maker(device), shape.tokens[-1:]
    b, h, d = shape.batch, shape.heads, shape.head_dim
    given = {key: make(b, tokens, h, d) for key in "qkv"}
    u, state = b * tokens * h * d * E, b * h * d * (d + 1) * 4
    return Case(
        "relu_linear_attention", name, given, ("q", "k", "v"), stock.relu_linear_attention,
        lambda given: (relu_linear_attention(given["q"], given["k"], given["v"]),),
        Traffic(4 * u + state, 7 * u + state, "4u / 7u + state"),
    )  # fmt: skip


def _glu(name: str, shape: Shape, device: torch.device) -> Case:
    """Return the middle of Sana's Mix-FFN."""
    assert shape.glu is not None
    make, (height, width, c) = _Maker(device), shape.glu
    given = {
        "h": make(shape.batch, height, width, 2 * c),
        "weight": make(2 * c, 1, 3, 3, std=1 / 3),
        "bias": make(2 * c, std=0.1),
    }
    u, filters = shape.batch * height * width * c * E, 20 * c * E
    return Case(
        "silu_dwconv_glu", name, given, ("h",), stock.silu_dwconv_glu,
        lambda given: (silu_dwconv_glu(given["h"], given["weight"], given["bias"]),),
        Traffic(3 * u + filters, 11 * u + filters, "3u / 11u + filters, u of the output"),
        channels_first=("h",),
    )  # fmt: skip


def _finite_norms(name: str, shape: Shape, device: torch.device) -> Case:
    """Return the guard's norms of all adapters' gradients, in two groups."""
    make, d, groups = _Maker(device), shape.width, 2
    given = {}
    for layer in range(shape.adapted):
        given[f"a{layer}"] = make(shape.rank, d, dtype=torch.float32, std=1e-4)
        given[f"b{layer}"] = make(d, shape.rank, dtype=torch.float32, std=1e-4)
    index = [i % groups for i in range(len(given))]
    elements = sum(tensor.numel() for tensor in given.values())
    chunks = sum(-(-tensor.numel() // CHUNK) for tensor in given.values())
    return Case(
        "finite_norms", name, given, (), partial(stock.norms, count=groups),
        lambda given: (finite_norms(list(given.values()), index, groups),),
        Traffic(4 * elements + 28 * chunks, 0, "gradients in fp32 + 28 a chunk"),
    )  # fmt: skip


_MAKERS: dict[str, Callable[[str, Shape, torch.device], Case]] = {
    "ada_norm": partial(_ada_norm, gated=False),
    "ada_norm_gated": partial(_ada_norm, gated=True),
    "qk_norm_rope": _qk_norm_rope,
    "lora_linear": partial(_lora, names="o"),
    "lora_qkv": partial(_lora, names="qkv"),
    "relu_linear_attention": _linear_attention,
    "silu_dwconv_glu": _glu,
    "finite_norms": _finite_norms,
}
OPS = tuple(_MAKERS)


def shape_of(name: str) -> Shape:
    """Return the shape of this name, `tiny` among them."""
    return TINY if name == "tiny" else SHAPES[name]


def applies(op: str, name: str) -> bool:
    """Return whether the model of this shape has the op."""
    shape = shape_of(name)
    has = {
        "qk_norm_rope": bool(shape.qk),
        "relu_linear_attention": shape.linear_attention,
        "silu_dwconv_glu": shape.glu is not None,
    }
    return has.get(op, True)


def build(op: str, name: str, device: torch.device) -> Case:
    """Return the case, on the device; its seed is always the same."""
    return _MAKERS[op](name, shape_of(name), device)
