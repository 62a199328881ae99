"""Measures, keeps and shows what a device reaches: `dit-lora doctor --measure`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from dit_lora.commands.doctor import table
from dit_lora.environment.ceilings import save_ceilings
from dit_lora.planning.measure import measure_ceilings
from dit_lora.terminal import printable


def measured(*, quick: bool) -> dict[str, Any]:
    """Measure this machine's first GPU, or its CPU, and keep it; return it with the file, None where it is not kept."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device, quick=quick)
    # The rates of tiny sizes are no ceilings.
    file = None if quick else str(save_ceilings(ceilings))
    return {**asdict(ceilings), "file": file}


def render_ceilings(found: Mapping[str, Any]) -> None:
    """Print rates as tables, then what could not be measured, and versions, clocks and power."""
    console = Console(highlight=False)
    copied, launch = found["copy"] / 1e12, 1e6 * found["launch"]
    rows = [("copy, read and written", f"{copied:.3f} TB/s"), ("host, an op", f"{launch:.1f} us")]
    console.print(table((printable(found["device"]), found["measured"]), rows))
    products = [
        (one["dtype"], "x".join(map(str, one["size"])), _tera(one["rate"]))
        for one in found["products"]
    ]
    console.print(table(("product of", "M x N x K", "TFLOP/s"), products))
    attention = [
        (
            one["shape"],
            "yes" if one["masked"] else "no",
            one["backend"],
            _tera(one["forward"]),
            _tera(one["backward"]),
            "yes" if one["same_bits"] else "NO",
        )
        for one in found["attention"]
    ]
    headings = ("attention", "mask", "backend", "forward", "backward", "same bits twice")
    console.print(table(headings, attention))
    lines = [f"not measured: {name}: {why}" for name, why in found["failed"].items()]
    lines.append(", ".join(f"{name} {value}" for name, value in found["about"].items()))
    lines.append(f"kept in {found['file']}" if found["file"] else "not kept: tiny sizes")
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"
