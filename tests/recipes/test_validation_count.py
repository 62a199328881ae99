"""Several samples of each validation prompt: each is that of its seed, and the report says which."""

from collections.abc import Callable
from pathlib import Path

Main = Callable[[list[str]], None]


def test_each_sample_is_that_of_its_seed(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    more = ["validation.prompts=[a red disc, a blue square]", "validation.inference_steps=1"]
    args = [*smoke, *more, "train.steps=1", "validation.seed=4"]
    lora_main([*args, "validation.count=2", f"run.dir={tmp_path / 'both'}"])
    lora_main([*args, "validation.seed=5", f"run.dir={tmp_path / 'second'}"])
    samples = "samples/step_000001"
    both = [(tmp_path / "both" / samples / f"prompt_{n:02d}.mp4").read_bytes() for n in range(4)]
    second = [(tmp_path / "second" / samples / f"prompt_{n:02d}.mp4").read_bytes() for n in range(2)]
    assert both[1::2] == second
    assert both[0] != both[1]
    report = (tmp_path / "both" / "report.html").read_text()
    for name in ("a red disc (seed 4)", "a red disc (seed 5)", "a blue square (seed 5)"):
        assert f"<h3>{name}</h3>" in report
