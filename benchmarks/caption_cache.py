"""Disk and peak host memory of a cache of captions at published sizes: memory must not grow with their number.

Fewer than a thousand are written in smaller parts, which take less memory.

    python -m benchmarks.caption_cache WORK [--captions 1000 1500] [--models NAME ...]

Each row is a process that fills a cache with the code of a run. An encoder of random values stands in for
the text encoder; shapes and dtypes are the checkpoint's own. 1,500 captions of Krea 2 take 44 GiB of disk.
"""

import argparse
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.step_models import CONFIGS
from dit_lora.config.load import load_recipe
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.fill import CacheJob, fill_cache
from dit_lora.families import get_family
from dit_lora.families.base import Tensors, TensorSpec

RECIPES = Path(__file__).parents[1] / "recipes"
MODELS = {
    "LTX-2": "ltx2/2_t2v.yaml",
    "LTX-2.3-Diffusers": "ltx2/2.3_t2v.yaml",
    "Krea-2-Raw": "krea2/raw.yaml",
    "Qwen-Image": "qwen_image/base.yaml",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--captions", type=int, nargs="+", default=[1000, 1500])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what the child processes run
    arguments = parser.parse_args(argv)
    if arguments.one:
        count = arguments.captions[0]
        size = filled(arguments.work, arguments.one, count)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"| {arguments.one} | {count} | {size / 2**20 / count:.2f} | {peak:.0f} |")
        return
    print("| model | captions | MiB a caption on disk | peak MiB of memory |\n|---|---:|---:|---:|")
    for name in arguments.models:
        for count in arguments.captions:
            work = arguments.work / name
            command = [sys.executable, "-m", "benchmarks.caption_cache", str(work)]
            try:
                subprocess.run([*command, "--one", name, "--captions", str(count)], check=True)
            finally:
                shutil.rmtree(work)


def filled(work: Path, name: str, count: int) -> int:
    """Fill a cache with the captions of a model; return its bytes on disk."""
    spec = text_spec(work / "model", name)
    cache = TensorCache(work / "texts")
    jobs = [CacheJob(f"{at}", f"{at:064x}", {}, lambda encoder: encoder()) for at in range(count)]
    fill_cache(cache, jobs, lambda: encoder_of(spec), launch_id="benchmark")
    return sum(path.stat().st_size for path in (work / "texts").rglob("*") if path.is_file())


def text_spec(path: Path, name: str) -> TensorSpec:
    """Tensor spec of one caption's embeddings, from a checkpoint with its published configs and no weights."""
    shutil.copytree(CONFIGS / name, path)
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    recipe = load_recipe(RECIPES / MODELS[name])
    model = recipe.model.model_copy(update={"path": str(path)})
    recipe = recipe.model_copy(update={"model": model})
    return get_family(model.family).open(model, recipe).encoders.text_spec(torch.bfloat16)


def encoder_of(spec: TensorSpec) -> Callable[[], Tensors]:
    """Build an encoder that gives different random values at each call, which no disk can compress."""
    generator = torch.Generator().manual_seed(0)

    def encode() -> Tensors:
        return {
            name: torch.rand(shape, generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.ones(shape, dtype=dtype)
            for name, (shape, dtype) in spec.items()
        }

    return encode


if __name__ == "__main__":
    main()
