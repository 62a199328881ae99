"""SiLU, depthwise 3x3 convolution and gated linear unit in one pass: the middle of Sana's Mix-FFN.

    s = silu(h)
    c = conv3x3(s) + bias, with one filter per channel and zero padding 1
    a, g = the first and the second half of c's channels
    out = a * silu(g)

Shapes: B samples, H rows, W columns; h, s and c have 2C channels, a, g and out have C; channels come last. In this
layout the 1x1 convolutions before and after are linear layers, and a video is passed with its frames as samples.

Terms: a tap is one of the nine positions of the filter, numbered by rows; in gradients tap 9 stands for the bias.
dout, dh, ds and dc are the gradients of out, h, s and c. A program of the convolution kernels computes a tile of ROWS
rows and 2 * PAIRS columns, for BLOCK_C channels.

Source: section 2.2 of https://arxiv.org/abs/2410.10629 (SANA), and between `conv_inverted` and `conv_point` of
`GLUMBConv.forward` in diffusers' models/transformers/sana_transformer.py.

Memory traffic, with u = B*H*W*C elements: the forward reads h and writes out, 3u (eager PyTorch 13u). The backward
reads h and dout and writes dc, 5u, then reads dc and h and writes dh, 6u (eager 23u). Without the buffer for dc it
would move 5u, but compute a and g again around every tile, from s two columns further out. By count that takes as much
time in arithmetic as it saves in traffic, and twice the registers. Saved for the backward: h, 2u (eager 7u).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dit_lora_kernels.support import (
    accumulation_dtype,
    accumulation_triton_dtype,
    cdiv,
    launch,
    launches,
    make_contiguous,
    make_rows_contiguous,
    next_power_of_2,
    op,
    tl,
    triton,
)

# A program computes PAIRS pairs of neighbouring columns and ROWS rows. It reads a row once, four columns per pair, and
# adds it to three rows of sums: SiLU, the slowest arithmetic, is computed twice per element and not nine times.
PAIRS = 4
MAX_ROWS = 16


# 1. reference


def silu_dwconv_glu_reference(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute SiLU, depthwise 3x3 convolution and gate in plain torch, differentiably, as the kernels' reference.

    It computes in fp32 (fp64 for fp64 inputs) and rounds the result once, to h's dtype.
    """
    a, g = _compute_halves(functional.silu(_to_compute_dtype(h)), weight, bias)
    return (a * functional.silu(g)).to(h.dtype)


def _to_compute_dtype(tensor: Tensor) -> Tensor:
    """Cast a tensor to the dtype that the op computes in: fp64 for fp64, else fp32."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def _get_shifted_views(x: Tensor) -> list[Tensor]:
    """Make nine shifted views of x (B, H, W, 2C), one for each position of a 3x3 filter; zero beyond the edges.

    Each has, at every pixel, the neighbour that this position of the filter reads.
    """
    H, W = x.shape[1:3]
    padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
    return [padded[:, i : i + H, j : j + W] for i in range(3) for j in range(3)]


def _convolve(x: Tensor, filters: Tensor) -> Tensor:
    """Convolve each channel of x (B, H, W, 2C) with its own 3x3 filter, `filters` (2C, 9); in x's dtype and shape."""
    # A sum of products, not conv2d: autocast would round its operands, cuDNN use TF32.
    total = torch.zeros_like(x)
    for tap, neighbour in zip(filters.unbind(1), _get_shifted_views(x), strict=True):
        total = total + tap * neighbour
    return total


def _compute_halves(s: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve s = silu(h) (B, H, W, 2C), add the bias, and split the channels into halves a and g (B, H, W, C)."""
    c = _convolve(s, _to_compute_dtype(weight).flatten(1))
    a, g = (c if bias is None else c + _to_compute_dtype(bias)).chunk(2, dim=-1)
    return a, g


def _compute_silu_gradient(x: Tensor) -> Tensor:
    """Compute the derivative of SiLU at each element of x."""
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _backward_reference(
    dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, taps: slice
) -> tuple[Tensor, list[Tensor]]:
    """Compute the gradients of h (B, H, W, 2C) and of the filters (2C,) at each position in `taps`, in plain torch.

    Positions 0 to 8 are those of the 3x3 filter, and 9 stands for the bias. It computes in fp32 (fp64 for fp64
    inputs).
    """
    wide, dout = _to_compute_dtype(h), _to_compute_dtype(dout)
    s = functional.silu(wide)
    a, g = _compute_halves(s, weight, bias)
    dc = torch.cat([dout * functional.silu(g), dout * a * _compute_silu_gradient(g)], dim=-1)
    # The transpose of a convolution is a convolution with the nine taps in reverse order.
    ds = _convolve(dc, _to_compute_dtype(weight).flatten(1).flip(1))
    # The factor of each tap in the forward; the bias is a tenth tap with the factor 1.
    factors = [*_get_shifted_views(s), torch.ones_like(s)]
    sums = [(dc * factor).sum((0, 1, 2)) for factor in factors[taps]]
    return ds * _compute_silu_gradient(wide), sums


# 2. kernels


@triton.jit
def _locate_tile(H, W, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Locate the program's tile: its sample, its first row, and the first column of each of its pairs (PAIRS, 1).

    A tile has ROWS rows and PAIRS pairs of neighbouring columns. The numbers are int64.
    """
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(W, 2 * PAIRS)
    down = tl.cdiv(H, ROWS)
    x = program % across * (2 * PAIRS) + 2 * tl.arange(0, PAIRS)[:, None]
    return program // (across * down), program // across % down * ROWS, x


# Filters, columns and sums are written out, one variable each: the sides of a tile in registers are powers of two, and
# it cannot be indexed.


@triton.jit
def _load_nine_taps(filters_ptr, tap, ok, ACC: tl.constexpr):
    """Load the nine weights of each channel's 3x3 filter, each (1, BLOCK_C); they are `tap` elements apart."""
    w0 = tl.load(filters_ptr, mask=ok, other=0).to(ACC)
    w1 = tl.load(filters_ptr + tap, mask=ok, other=0).to(ACC)
    w2 = tl.load(filters_ptr + 2 * tap, mask=ok, other=0).to(ACC)
    w3 = tl.load(filters_ptr + 3 * tap, mask=ok, other=0).to(ACC)
    w4 = tl.load(filters_ptr + 4 * tap, mask=ok, other=0).to(ACC)
    w5 = tl.load(filters_ptr + 5 * tap, mask=ok, other=0).to(ACC)
    w6 = tl.load(filters_ptr + 6 * tap, mask=ok, other=0).to(ACC)
    w7 = tl.load(filters_ptr + 7 * tap, mask=ok, other=0).to(ACC)
    w8 = tl.load(filters_ptr + 8 * tap, mask=ok, other=0).to(ACC)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


@triton.jit
def _load_neighbouring_columns(row_ptr, x, W, stride, ok, SILU: tl.constexpr, ACC: tl.constexpr):
    """Load the columns x - 1 to x + 2 of a row, which a 3x3 filter needs at x and x + 1; if SILU, apply SiLU to them.

    Columns beyond the edges are zero, as is their SiLU.
    """
    row_ptr += x * stride
    x0 = tl.load(row_ptr - stride, mask=ok & (x > 0) & (x - 1 < W), other=0).to(ACC)
    x1 = tl.load(row_ptr, mask=ok & (x < W), other=0).to(ACC)
    x2 = tl.load(row_ptr + stride, mask=ok & (x + 1 < W), other=0).to(ACC)
    x3 = tl.load(row_ptr + 2 * stride, mask=ok & (x + 2 < W), other=0).to(ACC)
    if SILU:
        x0 = x0 * (1 / (1 + tl.exp(-x0)))
        x1 = x1 * (1 / (1 + tl.exp(-x1)))
        x2 = x2 * (1 / (1 + tl.exp(-x2)))
        x3 = x3 * (1 / (1 + tl.exp(-x3)))
    return x0, x1, x2, x3


@triton.jit
def _add_row_to_column_sums(near, far, left, middle, right, w, bias):
    """Add an input row to one column of the 3x3 convolution, at the row above it, at itself and at the row below.

    Returns the sums for these three rows; the first is then complete. `near` and `far` are the sums so far for the row
    above and for the row itself; that for the row below starts with `bias`. `left`, `middle` and `right` are the input
    row's three neighbouring columns. They count for the row above with the last three weights of the filter `w`, for
    the row itself with the middle three, and for the row below with the first three.
    """
    above = near + left * w[6] + middle * w[7] + right * w[8]
    itself = far + left * w[3] + middle * w[4] + right * w[5]
    below = bias + left * w[0] + middle * w[1] + right * w[2]
    return above, itself, below


@triton.jit
def _convolution_kernel(
    h_ptr, filters_ptr, bias_ptr, dout_ptr, out_ptr, H, W, C,
    h_b, h_y, h_x, dout_b, dout_y, dout_x,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_C: tl.constexpr,
    BIAS: tl.constexpr, BACKWARD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store out = a * silu(g) (B, H, W, C), where a and g are the two halves of the convolution of silu(h).

    With BACKWARD, store instead dc (B, H, W, 2C), the gradient of a and g, from the gradient of out.
    """
    b, top, x = _locate_tile(H, W, ROWS, PAIRS)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    ok = c < C
    a_w = _load_nine_taps(filters_ptr + c, 2 * C, ok, ACC)
    g_w = _load_nine_taps(filters_ptr + C + c, 2 * C, ok, ACC)
    a_bias = tl.zeros([1, BLOCK_C], ACC)
    g_bias = tl.zeros([1, BLOCK_C], ACC)
    if BIAS:
        a_bias = tl.load(bias_ptr + c, mask=ok, other=0).to(ACC)
        g_bias = tl.load(bias_ptr + C + c, mask=ok, other=0).to(ACC)
    zero = tl.zeros([PAIRS, BLOCK_C], ACC)
    a0_near, a0_far, a1_near, a1_far = zero, zero, zero, zero
    g0_near, g0_far, g1_near, g1_far = zero, zero, zero, zero
    # One row more above and one below the program's own: they add to its first and last row. near is the sum of the
    # row before the one that is read, far of the one that is read. Three rows are on their way meanwhile: programs are
    # too large for other warps to hide a row's latency.
    for step in tl.range(0, ROWS + 2, num_stages=4):
        y = top + step - 1
        row_ptr = h_ptr + b * h_b + y * h_y + c
        row_ok = c < tl.where((y >= 0) & (y < H), C, 0)
        s0, s1, s2, s3 = _load_neighbouring_columns(row_ptr, x, W, h_x, row_ok, True, ACC)
        a0, a0_near, a0_far = _add_row_to_column_sums(a0_near, a0_far, s0, s1, s2, a_w, a_bias)
        a1, a1_near, a1_far = _add_row_to_column_sums(a1_near, a1_far, s1, s2, s3, a_w, a_bias)
        s0, s1, s2, s3 = _load_neighbouring_columns(row_ptr + C, x, W, h_x, row_ok, True, ACC)
        g0, g0_near, g0_far = _add_row_to_column_sums(g0_near, g0_far, s0, s1, s2, g_w, g_bias)
        g1, g1_near, g1_far = _add_row_to_column_sums(g1_near, g1_far, s1, s2, s3, g_w, g_bias)
        # Row y - 1 is complete. It is stored if it is one of the program's own rows.
        complete = c < tl.where((y > top) & (y <= H), C, 0)
        complete0, complete1 = complete & (x < W), complete & (x + 1 < W)
        gate0 = 1 / (1 + tl.exp(-g0))
        gate1 = 1 / (1 + tl.exp(-g1))
        pixel = (b * H + y - 1) * W + x
        if BACKWARD:
            dout_at = dout_ptr + b * dout_b + (y - 1) * dout_y + x * dout_x + c
            dout0 = tl.load(dout_at, mask=complete0, other=0).to(ACC)
            dout1 = tl.load(dout_at + dout_x, mask=complete1, other=0).to(ACC)
            dc_at = out_ptr + pixel * (2 * C) + c
            tl.store(dc_at, dout0 * (g0 * gate0), mask=complete0)
            tl.store(dc_at + C, dout0 * a0 * gate0 * (1 + g0 * (1 - gate0)), mask=complete0)
            tl.store(dc_at + 2 * C, dout1 * (g1 * gate1), mask=complete1)
            tl.store(dc_at + 3 * C, dout1 * a1 * gate1 * (1 + g1 * (1 - gate1)), mask=complete1)
        else:
            out_at = out_ptr + pixel * C + c
            tl.store(out_at, a0 * (g0 * gate0), mask=complete0)
            tl.store(out_at + C, a1 * (g1 * gate1), mask=complete1)


@triton.jit
def _input_gradient_kernel(
    dc_ptr, filters_ptr, h_ptr, dh_ptr, H, W, C2, h_b, h_y, h_x,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store dh, the gradient of h: silu'(h), SiLU's derivative, times the convolution of dc with the reversed filters.

    dc is the gradient of the convolution's output; C2 is its number of channels 2C.
    """
    b, top, x = _locate_tile(H, W, ROWS, PAIRS)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    # The transpose of a convolution: the filters from their last weight to their first.
    w = _load_nine_taps(filters_ptr + 8 * C2 + c, -C2, c < C2, ACC)
    zero = tl.zeros([PAIRS, BLOCK_C], ACC)
    near0, far0, near1, far1 = zero, zero, zero, zero
    for step in tl.range(0, ROWS + 2, num_stages=3):
        y = top + step - 1
        row_ptr = dc_ptr + (b * H + y) * W * C2 + c
        row_ok = c < tl.where((y >= 0) & (y < H), C2, 0)
        dc0, dc1, dc2, dc3 = _load_neighbouring_columns(row_ptr, x, W, C2, row_ok, False, ACC)
        ds0, near0, far0 = _add_row_to_column_sums(near0, far0, dc0, dc1, dc2, w, zero)
        ds1, near1, far1 = _add_row_to_column_sums(near1, far1, dc1, dc2, dc3, w, zero)
        complete = c < tl.where((y > top) & (y <= H), C2, 0)
        complete0, complete1 = complete & (x < W), complete & (x + 1 < W)
        h_at = h_ptr + b * h_b + (y - 1) * h_y + x * h_x + c
        h0 = tl.load(h_at, mask=complete0, other=0).to(ACC)
        h1 = tl.load(h_at + h_x, mask=complete1, other=0).to(ACC)
        gate0 = 1 / (1 + tl.exp(-h0))
        gate1 = 1 / (1 + tl.exp(-h1))
        dh_at = dh_ptr + ((b * H + y - 1) * W + x) * C2 + c
        tl.store(dh_at, ds0 * gate0 * (1 + h0 * (1 - gate0)), mask=complete0)
        tl.store(dh_at + C2, ds1 * gate1 * (1 + h1 * (1 - gate1)), mask=complete1)


@triton.jit
def _filter_gradient_kernel(
    dc_ptr, h_ptr, partial_ptr, first_tap, taps, H, W, C2, pixels, h_b, h_y, h_x,
    STEPS: tl.constexpr, PIXELS: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store the gradient of each filter at one of its nine positions (the tap), summed over the program's pixels.

    It is the sum over pixels p of dc(p) silu(h)(p + tap), where dc is the gradient of the convolution's output. Tap 9
    stands for the bias, whose gradient is the sum of dc.
    """
    program = tl.program_id(0).to(tl.int64)
    tap = first_tap + program % taps
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_C], ACC)
    for step in tl.range(0, STEPS, num_stages=3):
        pixel = (program // taps * STEPS + step) * PIXELS + tl.arange(0, PIXELS)[:, None]
        ok = (pixel < pixels) & (c < C2)[None, :]
        dc = tl.load(dc_ptr + pixel * C2 + c[None, :], mask=ok, other=0).to(ACC)
        y = pixel // W % H + tap // 3 - 1
        x = pixel % W + tap % 3 - 1
        h_at = h_ptr + pixel // W // H * h_b + y * h_y + x * h_x + c[None, :]
        near = ok & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        h = tl.load(h_at, mask=near, other=0).to(ACC)
        total += tl.sum(dc * tl.where(tap < 9, h / (1 + tl.exp(-h)), 1.0), axis=0)
    tl.store(partial_ptr + program * C2 + c, total, mask=c < C2)


# 3. launchers


def _reorder_by_tap(weight: Tensor) -> Tensor:
    """Reorder weights (2C, 1, 3, 3) to (9, 2C): neighbouring channels are adjacent in memory, as threads read them."""
    return weight.flatten(1).t().contiguous()


def _compute_tiles(shape: tuple[int, int, int], channels: int, block: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Compute the launch grid, over the samples' tiles and blocks of channels, and the size of a tile.

    `shape` is (B, H, W), and `block` the largest number of channels in a block.
    """
    B, H, W = shape
    # Rows in equal parts of at most MAX_ROWS: with 17, two programs of 9 and 8 and not of 16 and 1.
    rows = cdiv(H, cdiv(H, MAX_ROWS))
    block = min(block, next_power_of_2(channels))
    spots = B * cdiv(H, rows) * cdiv(W, 2 * PAIRS)
    return (spots, cdiv(channels, block)), {"ROWS": rows, "PAIRS": PAIRS, "BLOCK_C": block}


def launch_convolution(h: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor | None) -> Tensor:
    """Compute out (B, H, W, C) from h (B, H, W, 2C), weight (2C, 1, 3, 3) and bias (2C,) or None.

    With `dout`, the gradient of out, compute instead dc (B, H, W, 2C), the gradient of the convolution's output.
    """
    B, H, W, C = *h.shape[:3], h.shape[3] // 2
    output = torch.empty((B, H, W, C if dout is None else 2 * C), dtype=h.dtype, device=h.device)
    if output.numel() == 0:
        return output
    # Without dout, h stands in for a pointer that is not read.
    gradient = h if dout is None else make_rows_contiguous(dout)
    # Two channels a thread, whole lines a warp: the 18 weights and 8 sums of eight channels would spill.
    grid, tile = _compute_tiles((B, H, W), C, 128)
    launch(
        _convolution_kernel, grid, h, _reorder_by_tap(weight), h if bias is None else make_contiguous(bias),
        gradient, output, H, W, C,
        *h.stride()[:3], *gradient.stride()[:3], **tile,
        BIAS=bias is not None, BACKWARD=dout is not None, ACC=accumulation_triton_dtype(h.dtype), num_warps=8,
    )  # fmt: skip
    return output


def launch_input(dc: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of h (B, H, W, 2C) in h's dtype, from dc, that of the convolution's output (contiguous)."""
    B, H, W, C2 = h.shape
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if dh.numel() == 0:
        return dh
    grid, tile = _compute_tiles((B, H, W), C2, 512 // h.element_size())  # 16 bytes a thread
    launch(
        _input_gradient_kernel, grid, dc, _reorder_by_tap(weight), h, dh, H, W, C2, *h.stride()[:3], **tile,
        ACC=accumulation_triton_dtype(h.dtype), num_warps=4,
    )  # fmt: skip
    return dh


def launch_filter(dc: Tensor, h: Tensor, first_tap: int, last_tap: int) -> Tensor:
    """Compute the filters' gradients at positions `first_tap` to `last_tap` - 1, (last_tap - first_tap, 2C).

    Positions 0 to 8 are those of the 3x3 filter, and 9 stands for the bias. `dc` is the gradient of the convolution's
    output. The result is in fp32 (fp64 for fp64 inputs).
    """
    H, W, C2 = h.shape[1:]
    pixels, taps = h.shape[:3].numel(), last_tap - first_tap
    # A program sums up to 16 steps of 16 pixels; torch adds up the chunks, in the same order every time.
    steps = min(16, max(1, cdiv(pixels, 16)))
    chunks = cdiv(pixels, steps * 16)
    partial = torch.empty((chunks, taps, C2), dtype=accumulation_dtype(h.dtype), device=h.device)
    if partial.numel() > 0:
        block = min(64, next_power_of_2(C2))
        launch(
            _filter_gradient_kernel, (chunks * taps, cdiv(C2, block)), dc, h, partial, first_tap, taps,
            H, W, C2, pixels, *h.stride()[:3],
            STEPS=steps, PIXELS=16, BLOCK_C=block, ACC=accumulation_triton_dtype(h.dtype), num_warps=4,
        )  # fmt: skip
    return partial.sum(0)


# 4. op


@op("silu_dwconv_glu")
def silu_dwconv_glu_forward(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute SiLU, depthwise 3x3 convolution and gate, (B, H, W, C).

    This is the forward op, which does not check its operands.
    """
    if launches(h):
        return launch_convolution(make_rows_contiguous(h), weight, bias, None)
    return silu_dwconv_glu_reference(h, weight, bias).contiguous()


@silu_dwconv_glu_forward.register_fake
def _fake_silu_dwconv_glu_forward(h: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
    return h.new_empty((*h.shape[:3], h.shape[3] // 2))


@op("silu_dwconv_glu_backward")
def silu_dwconv_glu_backward(
    dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, needed_gradients: list[bool]
) -> list[Tensor]:
    """Compute the gradients of h, weight and bias that `needed_gradients` selects.

    This is the convolution's backward op.

    They are returned in this order, each in its operand's dtype, without those not needed. `dout` is the gradient of
    the output.
    """
    of_h, of_weight, of_bias = needed_gradients
    # Taps 0 to 8 are the weight's and 9 is the bias's, which comes without them if only its gradient is needed.
    taps = slice(0 if of_weight else 9, 10 if of_bias else 9)
    dh, sums = None, []
    if launches(h):
        h = make_rows_contiguous(h)
        dc = launch_convolution(h, weight, bias, dout)
        if of_h:
            dh = launch_input(dc, h, weight)
        if of_weight or of_bias:
            sums = list(launch_filter(dc, h, taps.start, taps.stop))
    else:
        dh, sums = _backward_reference(dout, h, weight, bias, taps)
    gradients = []
    if dh is not None and of_h:
        gradients.append(dh.to(h.dtype).contiguous())
    if of_weight:
        gradients.append(torch.stack(sums[:9], dim=1).view(weight.shape).to(weight.dtype))
    if bias is not None and of_bias:
        # A copy: as a view it would keep the buffer of all taps alive.
        gradients.append(sums[-1].to(bias.dtype, copy=True))
    return gradients


@silu_dwconv_glu_backward.register_fake
def _fake_silu_dwconv_glu_backward(
    _dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    operands = zip((h, weight, bias), needs, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, want in operands if want and tensor is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # h, from which a and g can be recomputed, and the filters.
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad)
    gradients = iter(silu_dwconv_glu_backward(dout, *ctx.saved_tensors, needs))
    return tuple(next(gradients) if want else None for want in needs)


silu_dwconv_glu_forward.register_autograd(_backward, setup_context=_setup_context)


def silu_dwconv_glu(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``a * silu(g)``, where a and g are the two halves of a depthwise 3x3 convolution of ``silu(h)``.

    It computes in fp32 (fp64 for fp64 inputs) and rounds once. Only h and the parameters are saved for the backward.
    The gradients of weight and bias, if needed, take a separate pass.

    Args:
        h: (B, H, W, 2C), channels last, with any strides; it is copied unless its last dimension is contiguous.
        weight: (2C, 1, 3, 3), as that of `torch.nn.Conv2d(2C, 2C, 3, padding=1, groups=2C)`, in any floating dtype.
        bias: (2C,), in any floating dtype; None for a convolution without one.

    Returns:
        (B, H, W, C), in h's dtype.

    Raises:
        ValueError: a shape does not fit.
    """
    if h.ndim != 4 or h.shape[3] % 2:
        raise ValueError(
            f"h must be (B, H, W, 2C), channels last; got {tuple(h.shape)}; "
            "for (B, 2C, H, W) pass h.permute(0, 2, 3, 1)"
        )
    channels = h.shape[3]
    for name, tensor, shape in (("weight", weight, (channels, 1, 3, 3)), ("bias", bias, (channels,))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} for h {tuple(h.shape)}; got {tuple(tensor.shape)}")
    return silu_dwconv_glu_forward(h, weight, bias)
