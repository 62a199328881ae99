"""Rates that one device reaches, as `dit-lora doctor --measure` took them; kept beside Accelerate's own facts of the machine."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.config.records import read_typed
from dit_lora.environment.versions import default_launch_config
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole

VERSION = 1
"""The version of the file; one of another is measured anew."""


@dataclass(frozen=True)
class ProductRate:
    """Products of one size, (M, K) by (K, N)."""

    dtype: str
    """`fp32`, `bf16` or `fp8`."""
    size: tuple[int, int, int]
    """M, N and K."""
    rate: float
    """FLOP a second."""


@dataclass(frozen=True)
class AttentionRate:
    """Attention of one shape by one backend."""

    shape: str
    """Batch x heads x queries x keys x head width."""
    backend: str
    """`default` is PyTorch's own choice."""
    masked: bool
    forward: float
    """FLOP a second: 4 for each batch, head, query, key and channel."""
    backward: float
    """FLOP a second, of two and a half times as many."""
    same_bits: bool
    """True if two backward passes gave the same bits."""


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device."""

    device: str
    measured: str
    """The date."""
    copy: float
    """Bytes a second of a copy within the device, read and written."""
    launch: float
    """Seconds of the host for one op of a small model, forward or backward."""
    products: Sequence[ProductRate]
    attention: Sequence[AttentionRate]
    failed: Mapping[str, str] = field(default_factory=dict)
    """The names of those that could not be measured, and why."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Versions, and clocks and power while it was measured."""

    @property
    def source(self) -> str:
        """Say where the rates are from."""
        return f"rates of {self.device}, measured on {self.measured}"

    def product(self, dtype: str) -> float:
        """Return the FLOP a second that products of this dtype reach: the middle of the sizes; fp32's for what was not measured."""
        rates = sorted(one.rate for one in self.products if one.dtype == dtype)
        if not rates:
            rates = sorted(one.rate for one in self.products if one.dtype == "fp32")
        return rates[len(rates) // 2]

    def attend(self, *, masked: bool) -> AttentionRate:
        """Return the rates of PyTorch's own choice at the longest shape: with a mask, or without where none was measured."""
        own = [one for one in self.attention if one.backend == "default"]
        return next((one for one in own if one.masked == masked), own[0])


def ceilings_file(device: str) -> Path:
    """Return where the rates of the device of this name are kept; it need not exist."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return default_launch_config().parent.parent / "dit-lora" / f"ceilings_{name}.json"


def save_ceilings(ceilings: Ceilings) -> Path:
    """Keep them for plans and runs on this machine; return the file."""
    path = ceilings_file(ceilings.device)
    write_whole(path, json.dumps({"version": VERSION, **asdict(ceilings)}, indent=1) + "\n")
    return path


def load_ceilings(device: str) -> Ceilings | None:
    """Return what was measured of the device of this name; None if nothing was, or by another version of ours."""
    path = ceilings_file(device)
    return read_ceilings(path) if path.is_file() else None


def read_ceilings(path: Path) -> Ceilings | None:
    """Read a file of `save_ceilings`; None for one of another version. Raises `DitLoraError` for any other file."""
    try:
        content = read_typed(path, dict[str, Any])
        if content["version"] != VERSION:
            return None
        return _ceilings(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DitLoraError(
            f"{path} is not what `dit-lora doctor --measure` writes ({type(error).__name__}: {error}); "
            "delete it and measure again"
        ) from error


def _ceilings(content: Mapping[str, Any]) -> Ceilings:
    products = [
        ProductRate(one["dtype"], (*map(int, one["size"]),), float(one["rate"]))  # type: ignore[arg-type]
        for one in content["products"]
    ]
    attention = [AttentionRate(**one) for one in content["attention"]]
    if not attention or not any(one.dtype == "fp32" for one in products):
        raise ValueError("it has no rate of fp32 products, or none of attention")
    return Ceilings(
        device=str(content["device"]),
        measured=str(content["measured"]),
        copy=float(content["copy"]),
        launch=float(content["launch"]),
        products=products,
        attention=attention,
        failed=content["failed"],
        about=content["about"],
    )


def _of_h200() -> Ceilings:
    # docs/benchmarks/gpu.md: each dtype's middle rate over the sizes, and PyTorch's own choice of attention.
    products = [
        ProductRate("fp32", (8192, 11200, 2240), 51.5e12),
        ProductRate("bf16", (17776, 3072, 3072), 798e12),
        ProductRate("fp8", (17776, 3072, 3072), 1.50e15),
    ]
    attention = [
        AttentionRate("1x48x17776x17776x64", "default", False, 431e12, 433e12, same_bits=False),
        AttentionRate("8x20x1024x304x112", "default", True, 209e12, 148e12, same_bits=True),
    ]
    return Ceilings("an H200", "2026-11-26", 4.26e12, 14.3e-6, products, attention)


H200 = _of_h200()
"""The rates that a plan counts with where nothing was measured."""
