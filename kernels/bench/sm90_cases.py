"""Launches of every kernel at the sizes of real models, on tensors without values: what sm90.py compiles.

Activations are bf16, statistics and tables of rotations fp32, tables of modulations bf16, but Wan's in fp32.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dit_lora_kernels import ada_norm, finite_norm, qk_norm_rope_kernels, relu_linear_attention, silu_dwconv_glu

BF16, FP32 = torch.bfloat16, torch.float32


def _empty(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _ada_norm(
    size: tuple[int, int, int], *, table: torch.dtype = BF16, affine: bool = False, norm: str = "layer",
    gated: bool = True
) -> None:  # fmt: skip
    """Launch the forward of one stream (B,T,D)."""
    b, t, d = size
    x, tables = _empty(*size), [_empty(b, 1, d, dtype=table) for _ in range(3)]
    y, gate = (_empty(*size), tables[2]) if gated else (None, None)
    weight, bias = (_empty(d), _empty(d)) if affine else (None, None)
    stats = _empty(1 + (norm == "layer"), b, t, dtype=FP32)
    stream = ada_norm.AdaNormInputs(x, tables[0], tables[1], y, gate)
    residual = None if y is None else _empty(*size)
    ada_norm.launch_forward(stream, weight, bias, residual, _empty(*size), stats, 1e-5)


def _ada_norm_backward(
    size: tuple[int, int, int], *, table: torch.dtype = BF16, affine: bool = False, gated: bool = True,
    full: bool = False
) -> None:  # fmt: skip
    """Launch the backward of one stream with LayerNorm; `full` asks for all three tables' gradients too."""
    b, t, d = size
    rows = [_empty(*size) for _ in range(4)]
    scale, gate = (_empty(b, 1, d, dtype=table) for _ in range(2))
    operands = ada_norm.BackwardOperands(
        rows[0], rows[1], rows[2], _empty(2, b, t, dtype=FP32),
        rows[3] if full else None, gate if gated else None, scale, _empty(d) if affine else None,
    )  # fmt: skip
    made = (_empty(*size), _empty(*size) if gated else None)
    ada_norm.launch_backward(operands, made, 1, [full] * 3)


def _qk_norm_rope(
    size: tuple[int, int, int, int],
    rows: int,
    *,
    kind: str = "layer",
    rotation: str = "interleaved",
    per_head: bool = False,
    backward: bool = False,
    trained: bool = False,
) -> None:
    """Launch one direction for one of q, k (B,S,H,D), of which the last `rows` tokens are rotated."""
    b, s, h, d = size
    across, norm = kind == "across", "rms" if kind == "across" else kind
    options = qk_norm_rope_kernels.NormRopeOptions(norm, 1e-6, across, rotation, s - rows)
    width = h * d if across else d
    x, cos, sin = _empty(*size), *(_empty(rows, h * d if per_head else d, dtype=FP32) for _ in "cs")
    weight = None if norm == "none" else _empty(width)
    bias = _empty(width) if norm == "layer" else None
    rstd = None if norm == "none" else _empty(b, s, 1 if across else h, dtype=FP32)
    if not backward:
        qk_norm_rope_kernels.launch_forward(x, weight, bias, cos, sin, options, rstd)
        return
    source = None if norm == "none" else _empty(*size)
    operands = qk_norm_rope_kernels.BackwardOperands(x, source, None if trained else rstd, weight, bias, cos, sin)
    needs = (True, trained, trained and bias is not None)
    qk_norm_rope_kernels.launch_backward(operands, options, needs)


def _relu(size: tuple[int, int, int, int], *, rotated: bool, dtype: torch.dtype = BF16) -> None:
    """Launch all four kernels of linear attention on (B,S,H,D)."""
    b, s, h, d = size
    wide = torch.float64 if dtype is torch.float64 else FP32
    cos, sin = (_empty(s, d, dtype=FP32) if rotated else None for _ in "cs")
    q, k, v, grad = (_empty(*size, dtype=dtype) for _ in range(4))
    relu_linear_attention.launch_forward(q, k, v, cos, sin, 1e-6)
    state, z = _empty(b, h, d, d, dtype=wide), _empty(b, h, d, dtype=wide)
    operands = relu_linear_attention.BackwardOperands(grad, q, k, v, cos, sin, state, z)
    grads = [_empty(*size, dtype=dtype) for _ in range(3)]
    relu_linear_attention.launch_backward(operands, 1e-6, grads)


def _glu(size: tuple[int, int, int, int], dtype: torch.dtype = BF16) -> None:
    """Launch forward, dc, dh and the filters' gradient on (B,H,W,2C)."""
    h, weight, bias = (_empty(*shape, dtype=dtype) for shape in (size, (size[3], 1, 3, 3), (size[3],)))
    out = silu_dwconv_glu.launch_convolution(h, weight, bias, None)
    dc = silu_dwconv_glu.launch_convolution(h, weight, bias, out)
    silu_dwconv_glu.launch_input(dc, h, weight)
    silu_dwconv_glu.launch_filter(dc, h, 0, 10)


def _norms(dtype: torch.dtype, elements: int) -> None:
    """Launch the norm of 672 gradients."""
    finite_norm._launch([_empty(elements, dtype=dtype) for _ in range(672)], [0] * 672, 1)


COGVIDEOX, SANA, DIT, WAN, LTX = (
    (1, 17550, 3072), (8, 1024, 2240), (32, 256, 1152), (1, 32760, 5120), (1, 5632, 2048),
)  # fmt: skip
CASES: dict[str, dict[str, Callable[[], None]]] = {
    "ada_norm": {
        "cogvideox forward": partial(_ada_norm, COGVIDEOX, affine=True),
        "cogvideox forward, no y": partial(_ada_norm, COGVIDEOX, affine=True, gated=False),
        "cogvideox backward": partial(_ada_norm_backward, COGVIDEOX, affine=True),
        "cogvideox backward, no y": partial(_ada_norm_backward, COGVIDEOX, affine=True, gated=False),
        "cogvideox backward with tables": partial(_ada_norm_backward, COGVIDEOX, affine=True, full=True),
        "sana forward": partial(_ada_norm, SANA),
        "sana backward": partial(_ada_norm_backward, SANA),
        "dit forward": partial(_ada_norm, DIT),
        "dit forward, no y": partial(_ada_norm, DIT, gated=False),
        "dit backward": partial(_ada_norm_backward, DIT),
        "dit backward, no y": partial(_ada_norm_backward, DIT, gated=False),
        "dit backward with tables": partial(_ada_norm_backward, DIT, full=True),
        "wan forward": partial(_ada_norm, WAN, table=FP32),
        "wan backward": partial(_ada_norm_backward, WAN, table=FP32),
        "wan backward with tables": partial(_ada_norm_backward, WAN, table=FP32, full=True),
        "ltx forward": partial(_ada_norm, LTX, norm="rms"),
    },
    "qk_norm_rope": {
        "cogvideox forward": partial(_qk_norm_rope, (1, 17776, 48, 64), 17550),
        "cogvideox backward": partial(_qk_norm_rope, (1, 17776, 48, 64), 17550, backward=True),
        "cogvideox backward, trained": partial(_qk_norm_rope, (1, 17776, 48, 64), 17550, backward=True, trained=True),
        "wan forward": partial(_qk_norm_rope, (1, 32760, 40, 128), 32760, kind="across"),
        "wan backward": partial(_qk_norm_rope, (1, 32760, 40, 128), 32760, kind="across", backward=True),
        "wan backward, trained": partial(
            _qk_norm_rope, (1, 32760, 40, 128), 32760, kind="across", backward=True, trained=True
        ),
        "mistral forward, halves": partial(_qk_norm_rope, (2, 2048, 32, 128), 2048, kind="none", rotation="half"),
        "ltx backward": partial(_qk_norm_rope, (1, 5632, 32, 64), 5632, kind="across", per_head=True, backward=True),
        "flux backward, no norm": partial(_qk_norm_rope, (1, 4608, 24, 128), 4608, kind="none", backward=True),
    },
    "relu_linear_attention": {
        "sana": partial(_relu, (8, 1024, 70, 32), rotated=False),
        "sana-video": partial(_relu, (1, 7800, 20, 112), rotated=True),
        "sana fp16": partial(_relu, (8, 1024, 70, 32), rotated=False, dtype=torch.float16),
        "width 128 fp64": partial(_relu, (1, 512, 2, 128), rotated=False, dtype=torch.float64),
    },
    "silu_dwconv_glu": {
        "sana": partial(_glu, (8, 32, 32, 11200)),
        "sana fp32": partial(_glu, (8, 32, 32, 11200), FP32),
    },
    "finite_norm": {
        "fp32": partial(_norms, FP32, 196608),
        "bf16": partial(_norms, BF16, 196608),
        "fp16": partial(_norms, torch.float16, 196608),
        "fp64": partial(_norms, torch.float64, 196608),
        "fp32 unaligned": partial(_norms, FP32, 196607),
    },
}
