"""Ways to break silu_dwconv_glu that its tests must see."""

MUTANTS: list[tuple[str, str, str]] = [
    (
        "every program works on the first sample",
        "return program // (across * down), program",
        "return program // (across * down) * 0, program",
    ),
    (
        "rows and columns of tiles confused",
        "program // across % down * ROWS",
        "program % down * ROWS",
    ),
    (
        "int32 offsets",
        "program = tl.program_id(0).to(tl.int64)\n    across",
        "program = tl.program_id(0)\n    across",
    ),
    ("left edge not masked", "mask=ok & (x > 0) & (x - 1 < W)", "mask=ok & (x - 1 < W)"),
    ("right edge one column late", "mask=ok & (x + 2 < W)", "mask=ok & (x + 1 < W)"),
    (
        "lower edge one row late",
        "c < tl.where((y >= 0) & (y < H), C, 0)",
        "c < tl.where((y >= 0) & (y <= H), C, 0)",
    ),
    (
        "upper edge of dc not masked",
        "c < tl.where((y >= 0) & (y < H), C2, 0)",
        "c < tl.where(y < H, C2, 0)",
    ),
    ("a tap dropped", "+ middle * w[7] + right * w[8]", "+ middle * w[7]"),
    (
        "the filter transposed",
        "itself = far + left * w[3] + middle * w[4] + right * w[5]",
        "itself = far + left * w[1] + middle * w[4] + right * w[7]",
    ),
    (
        "filters not turned round in the backward",
        "_load_nine_taps(filters_ptr + 8 * C2 + c, -C2, c < C2, ACC)",
        "_load_nine_taps(filters_ptr + c, C2, c < C2, ACC)",
    ),
    (
        "the gate's filters for both halves",
        "a_w = _load_nine_taps(filters_ptr + c,",
        "a_w = _load_nine_taps(filters_ptr + C + c,",
    ),
    ("the bias dropped", "far + left", "far - bias + left"),
    (
        "the first row is not written",
        "(y > top) & (y <= H), C, 0",
        "(y > top + 1) & (y <= H), C, 0",
    ),
    ("the last row is not written", "(y > top) & (y <= H), C2, 0", "(y > top) & (y < H), C2, 0"),
    ("SiLU of h left out for one column", "x2 = x2 * (1 / (1 + tl.exp(-x2)))", "x2 = x2 * 1"),
    (
        "dc of the gate without a",
        "dout0 * a0 * gate0 * (1 +",
        "dout0 * gate0 * (1 +",
    ),
    (
        "silu' as the sigmoid's slope",
        "ds1 * gate1 * (1 + h1 * (1 - gate1))",
        "ds1 * gate1 * (1 - gate1)",
    ),
    ("samples confused in the filters' gradient", "pixel // W // H * h_b", "pixel // W % H * h_b"),
    ("only the first chunk of pixels summed", "program // taps * STEPS + step", "step"),
    (
        "the tap's column from its row",
        "x = pixel % W + tap % 3 - 1",
        "x = pixel % W + tap // 3 - 1",
    ),
    (
        "the tail of pixels counted",
        "(pixel < pixels) & (c < C2)",
        "(pixel < pixels + 1) & (c < C2)",
    ),
    (
        "gradient's strides are h's",
        "*h.stride()[:3], *gradient.stride()[:3]",
        "*h.stride()[:3], *h.stride()[:3]",
    ),
    (
        "h not upcast",
        "x1 = tl.load(row_ptr, mask=ok & (x < W), other=0).to(ACC)",
        "x1 = tl.load(row_ptr, mask=ok & (x < W), other=0)",
    ),
    ("partials averaged", "return partial.sum(0)", "return partial.mean(0)"),
    ("the weight's gradient by tap", "torch.stack(sums[:9], dim=1)", "torch.stack(sums[:9])"),
]
