"""Write loops that are drawn by a seed into a folder."""

import random
from pathlib import Path

from benchmarks.loops.composer.plan import draw_plan
from benchmarks.loops.composer.script import write_script
from benchmarks.loops.loop_file import LoopFile, read_loop


def compose_scripts(seed: int, count: int) -> dict[str, str]:
    """Names and texts of composed loops; equal seeds give equal texts, and a larger count only adds to them."""
    generator = random.Random(seed)
    scripts = {}
    for number in range(count):
        plan = draw_plan(generator)
        scripts[f"seed_{seed}_{number:03d}"] = write_script(plan, f"Loop {number} of seed {seed}")
    return scripts


def compose_loops(seed: int, count: int, folder: Path) -> list[LoopFile]:
    """Write composed loops into `folder/composed` and return them."""
    target = folder / "composed"
    target.mkdir(parents=True, exist_ok=True)
    loops = []
    for name, text in compose_scripts(seed, count).items():
        path = target / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        loops.append(read_loop(path, folder))
    return loops
