"""A tiny checkpoint whose index names the package's own pipeline."""

import json
from pathlib import Path

from dit_lora.families.sd3 import tiny


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    tiny.build_tiny_checkpoint("sd3.5-large", folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "ToyPipeline"}))
