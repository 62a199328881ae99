"""Ways to break lora_linear; test_lora_linear.py must see each."""

MUTANTS: list[tuple[str, str, str]] = [
    (
        "scaling left out of B",
        "scaled = b if scaling == 1 else b.to(torch.promote_types(b.dtype, dtype)) * scaling",
        "scaled = b",
    ),
    ("scaling left out of dB", "d_b[i] *= settings.scalings[i]", "pass"),
    (
        "the first projection's scaling in every dB",
        "d_b[i] *= settings.scalings[i]",
        "d_b[i] *= settings.scalings[0]",
    ),
    (
        "dB of the first projection's product",
        "d_b[i] = _weight_gradient(dys[i].t(), products[i])",
        "d_b[i] = _weight_gradient(dys[i].t(), products[0][:, :1].expand_as(products[i]))",
    ),
    ("base without its bias", "None if bias is None else _cast_if_needed(bias, rows.dtype)", "None"),
    (
        "the adapter replaces the base",
        "y.addmm_(products[i], lows_b[i].t())",
        "y.addmm_(products[i], lows_b[i].t(), beta=0)",
    ),
    (
        "dx of the first projection alone",
        "            dx.addmm_(dy, _base_weight(weight, quantized, dy.dtype))",
        "            pass",
    ),
    (
        "no dx through the adapters",
        "        dx.addmm_(joint, _stacked(lows_a))",
        "        pass",
    ),
    (
        "no dx through dropped adapters",
        "            dx += masked(gradient @ low_a, mask, scale)",
        "            pass",
    ),
    (
        "dx through an undropped adapter",
        "dx += masked(gradient @ low_a, mask, scale)",
        "dx += gradient @ low_a",
    ),
    (
        "dA of the undropped input",
        "_weight_gradient(gradient.t(), masked(rows, mask, scale))",
        "_weight_gradient(gradient.t(), rows)",
    ),
    (
        "kept values not scaled up in backward",
        "1 / (1 - dropout)",
        "1.0",
    ),
    (
        "one mask for all projections",
        "        masks.append(mask)",
        "        masks.append(masks[0] if masks else mask)",
    ),
    (
        "the undropped input goes through A",
        "products.append(dropped @ low_a.t())",
        "products.append(rows @ low_a.t())",
    ),
    (
        "a strided gradient read as if it were packed",
        "    if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]:\n        return rows\n"
        "    return rows.contiguous()",
        "    return rows.as_strided(rows.shape, (rows.shape[1], 1))",
    ),
    (
        "autocast stays on inside",
        "if not torch.is_autocast_enabled(kind):",
        "if kind:",
    ),
    (
        "the copy of a strided input is kept",
        "saved_x = x if any",
        "saved_x = rows if any",
    ),
    (
        "x is kept for nobody",
        "saved_x = x if any(ctx.needs_input_grad[4::size]) else None",
        "saved_x = x",
    ),
    (
        "a cast of the weight is kept",
        "ctx.save_for_backward(saved_x, *weights,",
        "ctx.save_for_backward(saved_x, *[w if w is None else w.to(x.dtype) for w in weights],",
    ),
    (
        "dB is computed for nobody",
        "                if needs_b[i]:",
        "                if True:",
    ),
    (
        "dx comes in the compute dtype",
        "return apply(_cast_if_needed(x, dtype), settings, *operands)",
        "return apply(x.detach().to(dtype).requires_grad_(x.requires_grad), settings, *operands)",
    ),
    (
        "dA in the compute dtype",
        "    return None if gradient is None else _cast_if_needed(gradient, dtype)",
        "    return None if gradient is None else gradient.bfloat16()",
    ),
    (
        "a product is cast where it need not be",
        "tensor if tensor.dtype is dtype else",
        "tensor.clone() if tensor.dtype is dtype else",
    ),
    (
        "A's are multiplied one by one",
        "        joint = rows @ _stacked(lows_a).t()\n"
        "        return _split_stacked(joint, [a.shape[0] for a in lows_a], 1), []",
        "        return [rows @ low_a.t() for low_a in lows_a], []",
    ),
    (
        "autocast's dtype is not asked for",
        "        return torch.get_autocast_dtype(x.device.type)",
        "        pass",
    ),
]
