"""Ways to break `ada_norm`: (description, old text, new text); each old text is once in its sources."""

MUTANTS: list[tuple[str, str, str]] = [
    ("every sample reads sample 0's rows", "    b = row // T\n", "    b = row * 0\n"),
    ("% for // in the batch", "    b = row // T\n", "    b = row % T\n"),
    ("the token's own number for its group", "    g = t // L\n", "    g = t\n"),
    ("every token reads group 0", "    g = t // L\n", "    g = t * 0\n"),
    ("one channel short", "    inside = columns < D\n", "    inside = columns < D - 1\n"),
    ("one channel over", "    inside = columns < D\n", "    inside = columns <= D\n"),
    (
        "the mask is not applied again after centering",
        "        x = tl.where(inside, x - mean, 0.0)\n    rstd",
        "        x = x - mean\n    rstd",
    ),
    (
        "one-pass variance",
        "        x = tl.where(inside, x - mean, 0.0)\n    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)\n",
        "    rstd = 1.0 / tl.sqrt(\n"
        "        tl.sum(x * x, axis=0) / D - (mean * mean if LAYER else 0.0) + EPS\n"
        "    )\n    if LAYER:\n        x = tl.where(inside, x - mean, 0.0)\n",
    ),
    (
        "eps outside the root",
        "tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)",
        "(tl.sqrt(tl.sum(x * x, axis=0) / D) + EPS)",
    ),
    (
        "sum for mean",
        "        mean = tl.sum(x, axis=0) / D\n",
        "        mean = tl.sum(x, axis=0)\n",
    ),
    (
        "the norm of the sum that was not rounded",
        "        x = stored.to(ACC)\n",
        "        x = x + update\n",
    ),
    ("no gate on y", "            update = update * gate.to(ACC)\n", "            gate = gate\n"),
    (
        "scale without its one",
        "        output = output * (1.0 + scale.to(ACC))\n",
        "        output = output * scale.to(ACC)\n",
    ),
    (
        "shift not upcast",
        "        output = output + shift.to(ACC)\n",
        "        output = (output.to(shift.dtype) + shift).to(ACC)\n",
    ),
    (
        "int32 offsets forward",
        "    row = tl.program_id(0).to(tl.int64)\n",
        "    row = tl.program_id(0)\n",
    ),
    (
        "int32 offsets backward",
        "    program = tl.program_id(0).to(tl.int64)\n",
        "    program = tl.program_id(0)\n",
    ),
    (
        "samples of the joint buffer are as long as a stream",
        "    output = output.to(out_ptr.dtype.element_ty)\n    tl.store(out_ptr + (b * S + t) * D",
        "    output = output.to(out_ptr.dtype.element_ty)\n    tl.store(out_ptr + (b * T + t) * D",
    ),
    (
        "rows of the next group are summed too",
        "        exists = first_row + i < L\n",
        "        exists = first_row + i < L * 2\n",
    ),
    (
        "the last row of a group is left out",
        "        exists = first_row + i < L\n",
        "        exists = first_row + i < L - 1\n",
    ),
    ("sample from the group's place", "    b = group // G\n", "    b = group % G\n"),
    ("no mean of dhat", "            dx -= tl.sum(dhat, axis=0) / D\n", "            dx -= 0.0\n"),
    (
        "the projection on the row is dropped",
        "        dx = dhat - hat * (tl.sum(dhat * hat, axis=0) / D)\n",
        "        dx = dhat\n",
    ),
    (
        "the residual's gradient twice",
        "        if dx_ptr is not None:\n            value = dx.to",
        "        if dx_ptr is not None:\n            dx += dx\n            value = dx.to",
    ),
    (
        "dgate from the gated gradient",
        "            dgate += dx * y\n",
        "            dgate += dx * y * rstd\n",
    ),
    ("dy without the gate", "                dx *= gate.to(ACC)\n", "                dx *= 1.0\n"),
    ("only the last row's shift", "            ones += grad\n", "            ones = grad\n"),
    ("mean for sum over programs", "else partials.sum(-2)", "else partials.mean(-2)"),
    (
        "one program too few",
        "_backward_kernel, (B * groups * chunks,)",
        "_backward_kernel, (B * groups * chunks - 1,)",
    ),
    (
        "rows without a stride are taken as they are",
        "tensor.stride(-1) == 1 or",
        "tensor.stride(-1) <= 1 or",
    ),
    ("dscale without the bias", "hats if bias is None else hats + ones * bias", "hats"),
    (
        "weight's gradient without 1 + scale",
        "((factor * hats).sum((0, 1)) if",
        "(hats.sum((0, 1)) if",
    ),
    (
        "streams overlap in the gradient",
        "by_stream[0][i], grad_residuals",
        "by_stream[0][0], grad_residuals",
    ),
    ("y is kept where the gate is frozen", "stream.y if want.gate else None", "stream.y"),
    ("means over the rstd", "D, stats.stride[0])", "D, 0)"),
    (
        "a plan takes x' for strided as x is",
        "x if y is None else x._replace(stride=(T * D, D, 1))",
        "x",
    ),
    (
        "a plan keeps y for another field",
        "y if needs[5 * i + 4] else None",
        "y if needs[5 * i + 1] else None",
    ),
    (
        "a plan's streams overlap in the gradient",
        "(rows[i], grad_residuals[i])",
        "(rows[0], grad_residuals[i])",
    ),
    (
        "a plan for tables of several shapes",
        "{table.shape for table in tables}",
        "{table.ndim for table in tables}",
    ),
]
