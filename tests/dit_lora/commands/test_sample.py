"""`dit-lora sample`: seeds in a row, strengths, several adapters; each cell is what stock Diffusers makes of it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import trained
from PIL import Image
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.cli.app import app
from dit_lora.commands.sample import SampleRequest, write_sample_cells, write_samples
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family
from dit_lora.families.base import Sampling, VideoShape

PROMPT = "a red disc"
SHAPE = {"frames": 1, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def base(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["sana-600m"]


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    first_folder, second_folder = (
        trained("sana", base, folder / name, seed=seed, scale=0.3).folder for name, seed in (("one", 1), ("other", 2))
    )
    return first_folder, second_folder


def request(target: Path, base: Path, out: Path, **options: Any) -> SampleRequest:
    sampling = {"inference_steps": 2, "guidance_scale": 1.0, **SHAPE}
    return SampleRequest(target, (PROMPT,), model=str(base), output_folder=out, **sampling, **options)


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def stock(base: Path, seed: int, put: Callable[[Any], None]) -> Any:
    """What the stock pipeline makes of the prompt, once `put` has loaded what it is to have."""
    checkpoint = get_family("sana").open(ModelConfig(family="sana", path=str(base)))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    put(pipeline)
    sampling = Sampling(VideoShape(1, 64, 64), 2, 1.0, seed)
    frames, _ = checkpoint.sampler.generate_with_sound(pipeline, checkpoint.sampler.prompt_kwargs(PROMPT), sampling)
    return frames[0].numpy()


def test_each_seed_of_a_row_gives_what_it_gives_alone(base: Path, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    row = write_samples(request(adapters[0], base, tmp_path / "row", seed=5, count=3))
    assert len(row) == 3
    for seed, path in zip((5, 6, 7), row, strict=True):
        (single_path,) = write_samples(request(adapters[0], base, tmp_path / f"alone_{seed}", seed=seed))
        assert single_path.name == path.name
        assert single_path.read_bytes() == path.read_bytes()
    assert len({path.read_bytes() for path in row}) == 3


def test_strengths_are_the_base_the_adapter_and_stock_weights_between(
    base: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    def loaded(weight: float) -> Callable[[Any], None]:
        def put(pipeline: Any) -> None:
            pipeline.load_lora_weights(adapters[0], adapter_name="own")
            pipeline.set_adapters("own", weight)

        return put

    sample_request = request(adapters[0], base, tmp_path / "row", seed=3, strengths=(1.5, 0, 1, 0.5))
    cells = {cell.strength: cell.path for cell in write_sample_cells(sample_request).cells}
    assert np.array_equal(pixels(cells[0]), stock(base, 3, lambda pipeline: None))
    (plain,) = write_samples(request(adapters[0], base, tmp_path / "plain", seed=3))
    assert plain.read_bytes() == cells[1].read_bytes()
    for weight in (0.5, 1.5):
        assert np.array_equal(pixels(cells[weight]), stock(base, 3, loaded(weight)))
    assert len({path.read_bytes() for path in cells.values()}) == 4


def test_several_adapters_act_as_stock_set_adapters_weighs_them(
    base: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    def put(pipeline: Any) -> None:
        for name, folder in zip(("a", "b"), adapters, strict=True):
            pipeline.load_lora_weights(folder, adapter_name=name)
        pipeline.set_adapters(["a", "b"], [0.75, -0.5])

    adapter_options = {"other_adapters": ((adapters[1], -0.5),), "weight": 0.75}
    (path,) = write_samples(request(adapters[0], base, tmp_path, seed=1, **adapter_options))
    assert np.array_equal(pixels(path), stock(base, 1, put))


def test_a_second_adapter_may_be_in_another_programs_form(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_checkpoints["flux2-klein"]
    first_folder, second_folder = (
        trained("flux2", base, tmp_path / name, seed=seed, scale=0.3).folder
        for name, seed in (("one", 1), ("other", 2))
    )
    comfyui = export(ExportRequest((second_folder,), "comfyui", tmp_path / "comfyui", model=str(base)))
    (file,) = comfyui.glob("*.safetensors")
    images = [
        pixels(write_samples(request(first_folder, base, tmp_path / name, other_adapters=other_adapters))[0]).astype(
            int
        )
        for name, other_adapters in (
            ("alone", ()),
            ("stock", ((second_folder, 0.5),)),
            ("foreign", ((file, 0.5),)),
        )
    ]
    assert abs(images[1] - images[2]).max() <= 1
    assert abs(images[0] - images[1]).max() > 8


@pytest.mark.parametrize("kind", ["dora", "lokr", pytest.param("loha", marks=pytest.mark.thorough), "oft"])
def test_other_kinds_are_sampled_and_left_out_at_strength_0(kind: Any, base: Path, tmp_path: Path) -> None:
    folder = trained("sana", base, tmp_path / "adapter", kind=kind, scale=0.3).folder
    target = folder if kind in PEFT_ONLY_KINDS else folder / "pytorch_lora_weights.safetensors"
    sample_request = request(target, base, tmp_path / "out", seed=2, strengths=(0, 1))
    base_pixels, adapter_pixels = (pixels(cell.path) for cell in write_sample_cells(sample_request).cells)
    assert np.array_equal(base_pixels, stock(base, 2, lambda pipeline: None))
    assert not np.array_equal(adapter_pixels, base_pixels)
    if kind == "oft":
        with pytest.raises(DitLoraError, match=r"strength 0\.5: OFT rotates"):
            write_samples(request(target, base, tmp_path / "half", strengths=(0.5,)))


def test_what_has_no_strength_is_refused_by_name(base: Path, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    wide_folder = trained("sana", base, tmp_path / "wider", connector=True).folder
    assert (wide_folder / BASE_FILE).is_file()
    for options in ({"strengths": (0.5,)}, {"other_adapters": ((adapters[0], 1.0),)}):
        with pytest.raises(DitLoraError, match="also has trained base weights"):
            write_samples(request(wide_folder, base, tmp_path / "out", **options))
    with pytest.raises(DitLoraError, match="also has trained base weights"):
        write_samples(request(adapters[0], base, tmp_path / "out", other_adapters=((wide_folder, 1.0),)))
    for arguments, message in (
        (["--strengths", "0,x"], "must be numbers"),
        (["--strengths", "1,1"], "without repetition"),
        (["--strengths", "nan"], "finite"),
        (["--weight", "2"], "needs --adapter"),
        (["--adapter", "x=inf"], "must be finite"),
        (["--adapter", "none"], "no adapter in none"),
    ):
        line = ["sample", str(adapters[0]), "--prompt", "x", "--model", str(base), *arguments]
        shape = [f"--{name}={value}" for name, value in SHAPE.items()]
        result = CliRunner().invoke(app, [*line, *shape])
        assert result.exit_code != 0
        assert message in str(result.exception), (arguments, result.exception)


def test_a_grid_is_a_page_beside_its_files(base: Path, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = [
        "sample",
        str(adapters[0]),
        "--prompt",
        "<b>a</b>",
        "--prompt",
        "b",
        "--model",
        str(base),
    ]
    arguments += [
        "--count",
        "2",
        "--strengths",
        "0,1",
        "--inference-steps",
        "1",
        "--out",
        str(tmp_path),
    ]
    arguments += [
        f"--adapter={adapters[1]}=0.5",
        *(f"--{name}={value}" for name, value in SHAPE.items()),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(files) == 8
    page = (tmp_path / "samples.html").read_text()
    assert all(f'src="{name}"' in page for name in files)
    assert page.count('<section class="row">') == 4
    head = " ".join(re.sub(r"<[^>]*>", " ", page.partition("<h1>")[2].partition("</dl>")[0]).split())
    assert re.search(r"Model \S+ Trained for \d+ steps Denoising steps 1 Guidance 6 Seed 0 to 1", head), head
    assert re.search(r"<(img|video) ", page)
    assert not re.search(r"<video[^>]* controls", page)
    assert "<b>a</b>" not in page
    assert result.stdout.splitlines()[-1] == str(tmp_path / "samples.html")
