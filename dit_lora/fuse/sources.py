"""A digest that identifies one version of the kernels' code."""

import hashlib
from pathlib import Path

import dit_lora
import dit_lora_kernels


def compute_sources_digest() -> str:
    """SHA-256 (hex) of the source files of the kernels, the patches and the code that compares them."""
    digest = hashlib.sha256()
    package_dir = Path(dit_lora.__file__).parent
    for folder in (Path(dit_lora_kernels.__file__).parent, package_dir / "fuse", package_dir / "guard"):
        for path in sorted(folder.rglob("*.py")):
            # The path counts too, ended by a NUL byte: a moved file gives another digest.
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
