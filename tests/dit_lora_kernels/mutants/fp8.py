"""Ways to break fp8; test_fp8.py must see each."""

_ROWS = "torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)"

MUTANTS: list[tuple[str, str, str]] = [
    ("one scale for all rows", _ROWS, "x.float().abs().max().expand(len(x), 1)"),
    ("a column's scale", _ROWS, "x.float().abs().amax(0)[:1].expand(len(x), 1)"),
    ("a row of zeros divides by zero", ".clamp(min=_SMALLEST)", ""),
    ("tiny rows are lost", ".clamp(min=_SMALLEST)", ".clamp(min=1e-6)"),
    ("what is not finite is made so", "(largest / _LARGEST)", "(largest.nan_to_num() / _LARGEST)"),
    ("codes beyond the largest", "(largest / _LARGEST)", "(largest / (2 * _LARGEST))"),
    ("codes far below the largest", "(largest / _LARGEST)", "(largest / 2.0**-7)"),
    ("fewer bits", "E4M3 = torch.float8_e4m3fn", "E4M3 = torch.float8_e5m2"),
    (
        "another weight in backward",
        "quantize_rows(weight.t().contiguous())",
        "quantize_rows(weight.t().contiguous().abs())",
    ),
    ("no scale of rows", "y = y * rows.scale * weight.scale.t()", "y = y * weight.scale.t()"),
    ("no scale of the weight", "y = y * rows.scale * weight.scale.t()", "y = y * rows.scale"),
    ("no bias", "(y if bias is None else y + bias.float())", "y"),
    ("one size is enough", "all(size % _MULTIPLE", "any(size % _MULTIPLE"),
    ("any dtype", "weight.dtype is torch.bfloat16 and ", ""),
    ("any tensor core", "(major, minor) < (8, 9)", "(major, minor) < (8, 0)"),
]
