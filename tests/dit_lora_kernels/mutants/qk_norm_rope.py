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
    ("rotated backwards", "b * c2 + a * s2\n", "b * c2 - a * s2\n"),
    ("the other's sine", "a * c1 - b * s1,", "a * c1 - b * s1 * 0.999,"),
    (
        "not masked again after centring",
        "a = tl.where(live, a - mean, 0.0)",
        "a = a - mean",
    ),
    (
        "reads one element too many",
        "mask=valid & (d < D), other=fill",
        "mask=valid & (d <= D), other=fill",
    ),
    (
        "16-bit arithmetic",
        "mask=valid & (d < D), other=fill).to(ACC)",
        "mask=valid & (d < D), other=fill)",
    ),
    (
        "the last pair is not written",
        "tl.interleave(a, b).to(dtype), mask=valid & (d < D))",
        "tl.interleave(a, b).to(dtype), mask=valid & (d < D - 2))",
    ),
    (
        "halves apart by the block",
        "b = tl.load(ptr + rows + D // 2",
        "b = tl.load(ptr + rows + BLOCK",
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
    ("transposed the wrong way", "b * c2 - a * s1", "b * c2 + a * s1"),
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
        "if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:",
        "if True:",
    ),
    ("one head's table for all", '"PER_HEAD": not shared,', '"PER_HEAD": False,'),
    (
        "an angle of the next head",
        "offsets = (row * (H if PER_HEAD else 1) + heads) * (D // 2) + i",
        "offsets = (row * (H if PER_HEAD else 1) + heads + 1) * (D // 2) + i",
    ),
    (
        "angles as far apart as elements",
        "offsets = (row * (H if PER_HEAD else 1) + heads) * (D // 2) + i",
        "offsets = (row * (H if PER_HEAD else 1) + heads) * D + i",
    ),
    (
        "an angle too many is read",
        "mask = (heads < count) & (i < D // 2)\n        c1",
        "mask = (heads < count) & (i <= D // 2)\n        c1",
    ),
    (
        "reference: neighbours' angles for halves",
        "return torch.cat([table, table], dim=-1)",
        "return table.repeat_interleave(2, dim=-1)",
    ),
    ("saves rstd of a trained weight", 'norm != "none" and not trained', 'norm != "none"'),
    ("reference: bias left in x_hat", "(y - _by_head(bias, y, 0.0)) / w", "y / w"),
    (
        "a weight near zero is recoverable",
        "if not bool((size > 1e-3).all()):",
        "if not bool((size > 0).all()):",
    ),
]
