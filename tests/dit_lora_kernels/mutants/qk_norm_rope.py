"""Ways to get qk_norm_rope wrong: each must fail a test (`run_mutants.py qk_norm_rope`)."""

MUTANTS: list[tuple[str, str, str]] = [
    (
        "32-bit token offset",
        "token = tl.program_id(0).to(tl.int64)\n",
        "token = tl.program_id(0)\n",
    ),
    (
        "32-bit head offset",
        "heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]\n    rows =",
        "heads = tl.arange(0, BLOCK_H)[:, None]\n    rows =",
    ),
    ("sample 0's table for all", "row += batch * R", "row += 0 * R"),
    ("one token too many is rotated", "(row >= 0) & (row < R)", "(row >= 0) & (row <= R)"),
    ("tokens before the first are rotated", "(row >= 0) & (row < R)", "row < R"),
    ("rotated backwards", "two * c2 + one * s2\n", "two * c2 - one * s2\n"),
    ("the other's sine", "one * c1 - two * s1,", "one * c1 - two * s1 * 0.999,"),
    (
        "not masked again after centring",
        "one = tl.where(live, one - mean, 0.0)",
        "one = one - mean",
    ),
    (
        "reads one element too many",
        "mask=valid & (d < D), other=other",
        "mask=valid & (d <= D), other=other",
    ),
    (
        "16-bit arithmetic",
        "mask=valid & (d < D), other=other).to(ACC)",
        "mask=valid & (d < D), other=other)",
    ),
    (
        "the last pair is not written",
        "tl.interleave(one, two).to(dtype), mask=valid & (d < D))",
        "tl.interleave(one, two).to(dtype), mask=valid & (d < D - 2))",
    ),
    (
        "halves apart by the block",
        "two = tl.load(ptr + rows + D // 2",
        "two = tl.load(ptr + rows + BLOCK",
    ),
    ("mean of each head's sum across heads", "keep_dims=True) / H", "keep_dims=True)"),
    (
        "the sample of another token",
        "batch, position = token // S, token % S\n    heads",
        "batch, position = token % S, token % S\n    heads",
    ),
    ("rstd of one head", "+ head, rstd, mask", "+ head * 0, rstd, mask"),
    (
        "no mean of the gradient",
        "x1, x2 = x1 - mean, x2 - mean",
        "x1, x2 = x1 - 0 * mean, x2 - mean",
    ),
    ("bias left in x_hat", "(y1 - b1) / w1", "y1 / w1"),
    ("gradient without the weight", "g1, g2 = d1 * w1, d2 * w2", "g1, g2 = d1 * w1, d2"),
    ("no projection on x_hat", "g1 - n1 * projection", "g1"),
    ("transposed the wrong way", "two * c2 - one * s1", "two * c2 + one * s1"),
    (
        "table of a token to spare",
        "row = tl.where(token < tokens, position - first, R)",
        "row = position - first",
    ),
    ("spare tokens are read and written", "count = tl.where(token < tokens, H, 0)", "count = H"),
    ("the last token's weight gradient", "dw1, dw2 = dw1 + d1 * n1,", "dw1, dw2 = d1 * n1,"),
    ("bias gradient of one half", "db1, db2 = db1 + d1, db2 + d2", "db1, db2 = db1 + d1, db2 + d1"),
    ("mean of partial sums", "dweight.sum(0)", "dweight.mean(0)"),
    (
        "the input's strides for the gradient",
        "rows = batch * grad_batch + position * grad_token",
        "rows = batch * source_batch + position * grad_token",
    ),
    (
        "elements not side by side",
        "return tensor if tensor.stride(-1) == 1 else tensor.contiguous()",
        "return tensor",
    ),
    ("one head's table for all", "cos is not None and cos.shape[-1] != width", "False"),
    ("saves rstd of a trained weight", 'norm != "none" and not trained', 'norm != "none"'),
    ("reference: bias left in x_hat", "(y - _by_head(bias, y, 0.0)) / w", "y / w"),
    (
        "a weight near zero is recoverable",
        "if not bool((size > 1e-3).all()):",
        "if not bool((size > 0).all()):",
    ),
]
