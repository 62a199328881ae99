"""Peak host memory of filling the cache, against the number of clips: it must not grow.

    python -m benchmarks.cache_memory [--clips 8 64 256]

Each count runs in a separate process on new clips of 17 frames, 64x96, with a tiny checkpoint. The last column is the
growth per clip over the first row. One clip's decoded pixels are 0.3 MiB.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dit_lora.config.load import parse_recipe
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.families import get_family


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # what the child processes run
    arguments = parser.parse_args(argv)
    if arguments.one:
        fill(arguments.one)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        return
    print("| clips | peak MiB | growth, KiB a clip |\n|---:|---:|---:|")
    baseline: tuple[int, float] | None = None
    for count in arguments.clips:
        peak = measure(count)
        growth = "" if baseline is None else f"{2**10 * (peak - baseline[1]) / (count - baseline[0]):.1f}"
        baseline = baseline or (count, peak)
        print(f"| {count} | {peak:.0f} | {growth} |", flush=True)


def measure(count: int) -> float:
    """MiB at the peak of a process that encodes `count` clips."""
    with tempfile.TemporaryDirectory() as folder:
        write_shapes(Path(folder) / "one", clips=6, frames=17, height=64, width=96, fps=8)
        clips = Path(folder) / "clips"
        clips.mkdir()
        sources = sorted((Path(folder) / "one").glob("*.mp4"))
        for index in range(count):
            # Trailing bytes make each file, and so each cache entry, one of its own.
            data = sources[index % len(sources)].read_bytes()
            free = (8 + len(str(index).encode())).to_bytes(4, "big") + b"free" + str(index).encode()
            (clips / f"{index:06d}.mp4").write_bytes(data + free)
            (clips / f"{index:06d}.txt").write_text(f"clip {index % 6}")
        get_family("cogvideox").build_tiny_checkpoint("cogvideox-2b", Path(folder) / "model", 0)
        command = [sys.executable, "-m", "benchmarks.cache_memory", "--one", folder]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(process.stdout)


def fill(folder: Path) -> None:
    from dit_lora.training.session.session import start_run_session
    from dit_lora.training.tasks.diffusion.precompute import precompute

    recipe = parse_recipe(
        {
            "model": {"family": "cogvideox", "path": str(folder / "model")},
            "data": {
                "path": str(folder / "clips"),
                "frames": 17,
                "height": 64,
                "width": 96,
                "fps": 8,
            },
            "train": {"steps": 1},
            "run": {"dir": str(folder / "run")},
        },
        "benchmark",
    )
    with start_run_session(recipe) as session:
        precompute(session, get_family("cogvideox").open(recipe.model))


if __name__ == "__main__":
    main()
