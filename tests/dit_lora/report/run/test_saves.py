"""The report's table of saved adapters: step, eval loss, samples, and the line that loads each."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import report, write_lines

from dit_lora.report.run.files import RunReader
from dit_lora.report.run.saves import list_saved_adapters


def write_saves(folder: Path, steps: list[int], name: str = "pytorch_lora_weights.safetensors") -> None:
    for step in steps:
        path = folder / "checkpoints" / f"step_{step:06d}" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"weights")


def change_config(folder: Path, section: str, values: dict[str, Any]) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config[section] |= values
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_each_save_has_its_loss_its_samples_and_its_line(run_dir: Path) -> None:
    assert 'id="saves"' not in report(run_dir).source
    write_saves(run_dir, [10, 15, 20])
    (run_dir / "checkpoints" / "step_000020" / "manifest.json").write_text("{}")
    (run_dir / "checkpoints" / "step_000005").mkdir()  # of an earlier version, without an adapter
    write_lines(
        run_dir / "eval_loss.jsonl", [{"step": s, "eval_loss": loss} for s, loss in ((0, 1), (10, 2), (20, 3))]
    )
    page = report(run_dir)
    rows = (
        "step 10 eval loss 2.0000 lowest sample 1 training state deleted",
        "step 15 eval loss not measured no samples training state deleted",
        "step 20 eval loss 3.0000 sample 1 training state kept",
    )
    for row, step in zip(rows, (10, 15, 20), strict=True):
        line = f'pipe.load_lora_weights("{run_dir.name}/checkpoints/step_{step:06d}")'
        assert f"{row} {line}" in page.text
    assert "step_000005" not in page.text
    links = [a["href"] for a in page.all("a") if "samples/" in (a["href"] or "")]
    assert links == ["samples/step_000010/prompt_00.mp4", "samples/step_000020/prompt_00.mp4"]
    assert all((run_dir / str(link)).is_file() for link in links)


def test_many_saves_fold(run_dir: Path) -> None:
    write_saves(run_dir, list(range(1, 31)))
    text = report(run_dir).section("Result")
    assert text.index("step_000011") < text.index("step_000030") < text.index("10 earlier") < text.index("step_000001")


@pytest.mark.parametrize(
    ("section", "values", "line"),
    [
        ("model", {"part": "transformer_2"}, 'pipe.load_lora_weights("{}", load_into_transformer_2=True)'),
        ("lora", {"kind": "lokr"}, 'dit_lora.load_adapter(pipe, "{}")'),
        ("model", {"family": "chat"}, 'model = PeftModel.from_pretrained(model, "{}")'),
    ],
)
def test_the_line_fits_what_trained(run_dir: Path, section: str, values: dict[str, Any], line: str) -> None:
    write_saves(run_dir, [3])
    change_config(run_dir, section, values)
    (saved,) = list_saved_adapters(RunReader(run_dir).read())
    assert saved.load_line == line.format(f"{run_dir.name}/checkpoints/step_000003")


def test_a_pipeline_without_a_loader_and_a_second_file_need_ours(run_dir: Path) -> None:
    write_saves(run_dir, [3])
    (run_dir / "facts.json").write_text(json.dumps({"pipeline": {"module": "diffusers", "loads_lora": False}}))
    folder = f"{run_dir.name}/checkpoints/step_000003"
    ours = f'dit_lora.load_adapter(pipe, "{folder}")'
    assert list_saved_adapters(RunReader(run_dir).read())[0].load_line == ours
    (run_dir / "facts.json").unlink()
    (run_dir / "checkpoints" / "step_000003" / "base_weights.safetensors").write_bytes(b"weights")
    assert list_saved_adapters(RunReader(run_dir).read())[0].load_line == ours
    change_config(run_dir, "model", {"family": "chat"})
    command = f"dit-lora chat {folder} --prompt '...'"
    assert list_saved_adapters(RunReader(run_dir).read())[0].load_line == command
