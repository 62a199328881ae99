"""What goes wrong in a first hour: each mistake gets one line that says what was wrong and what to type next."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.catalog import PackagedRecipe, write_run_folder
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

RECIPE = "smoke_cogvideox.yaml"
MADE = "model.path=tiny/made"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dit-lora init smoke/cogvideox` writes, a checkpoint, and clips of several kinds."""
    root = tmp_path_factory.mktemp("first") / "my-run"
    write_run_folder(PackagedRecipe.from_name("smoke/cogvideox"), root, "cpu")
    get_family("cogvideox").build_tiny_checkpoint("cogvideox-2b", root / "tiny" / "made", 0)
    write_shapes(root / "captioned", clips=1, frames=9, height=64, width=96, fps=8)
    (root / "empty").mkdir()
    (root / "runs" / "first").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (root / "runs" / "first" / name).touch()
    return root


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def said(arguments: str, exit_code: int = 2) -> str:
    """The one line of a refused command."""
    with pytest.raises(DitLoraError) as caught:
        CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
    assert caught.value.exit_code == exit_code
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "caption captioned --prompt x",
            "--base, --prompt and --frames need --model: without it, only the page is written",
        ),
        ("plan smoke_cogvideo.yaml", f"no recipe smoke_cogvideo.yaml; did you mean {RECIPE}?"),
        (
            "plan recipes/cogvideox/5b_t2v.yaml",
            "no recipe recipes/cogvideox/5b_t2v.yaml; copy it to a folder: dit-lora init cogvideox/5b_t2v my-run",
        ),
        ("plan cogvideox/5b_t2v", "dit-lora init cogvideox/5b_t2v my-run"),
        (
            "plan train.yaml",
            "no recipe train.yaml; see dit-lora recipes",
        ),
        (
            f"train {RECIPE} {MADE} data.path=captioned data.cache={RECIPE}",
            f"data.cache: {RECIPE} is a file; give a folder, which is created",
        ),
        ("init cogvidex my-run", "did you mean cogvideox or"),
        ("init cogvideox .", ". is not empty; choose another folder"),
        (
            "tiny cogvideox-9b out",
            "unknown tiny checkpoint 'cogvideox-9b'; choose one of anima, chroma, cogvideox-2b, ",
        ),
        (
            f"plan {RECIPE}",
            "model.path: tiny/cogvideox-2b does not exist; create it with "
            "dit-lora tiny cogvideox-2b tiny/cogvideox-2b",
        ),
        (
            f"audit {RECIPE} data.path=captioned",
            "create it with dit-lora tiny cogvideox-2b tiny/cogvideox-2b",
        ),
        (
            f"plan {RECIPE} model.path=./here",
            "./here does not exist; give the folder of a Diffusers checkpoint",
        ),
        (
            "audit clips",
            "data.path: the folder clips does not exist; put your clips there, or set data.path to their folder",
        ),
        ("audit clips", "for a first test: dit-lora tiny shapes clips"),
        (
            "audit empty",
            "no clips in empty (read as clips with a .txt each); it takes metadata.jsonl",
        ),
        (
            f"plan {RECIPE} {MADE} data.frames=10",
            "data.frames must be 8n + 1; got 10, nearest 9 and 17",
        ),
        (
            f"plan {RECIPE} {MADE} data.width=90",
            "must be a multiple of 16; got 90, nearest 80 and 96",
        ),
        (f"plan {RECIPE} train.step=3", "train.step: unknown key; did you mean train.steps?"),
        (f"plan {RECIPE} lr=1e-4", "lr: unknown key; did you mean optim.groups.adapter.lr?"),
        (f"plan {RECIPE} train.steps", "must be key.path=value, such as train.steps=20"),
        (f"plan {RECIPE} model.dtype=fp16", "fp16 is not offered"),
        (f"plan {RECIPE} {MADE} --gpu lots", "must be a size such as 24GiB, 80GB or 24; got 'lots'"),
        (
            "report runs/kitten",
            "runs/kitten is not a run: it has no config.yaml; give the folder in",
        ),
        (
            "sample empty --prompt x",
            "no adapter in empty; give a run's folder, an adapter's folder",
        ),
        ("replay runs/first", "no runs/first/bundle.json; give a folder below a run's bundles/"),
        (
            "doctor --config-file two.yaml",
            "the Accelerate config two.yaml does not exist; `dit-lora init RECIPE DIR`",
        ),
    ],
)
def test_a_mistake_at_the_command(arguments: str, message: str) -> None:
    error = said(arguments)
    assert message in error
    assert "Errno" not in error


@pytest.fixture(scope="module")
def torn_files(folder: Path) -> None:
    """Files that end in the middle, all named `torn...`, as of a full disk or an interrupted download."""
    (folder / "torn.yaml").write_text("model: {family: cogvideox\n  path: [x\n")
    (folder / "torn.pth").write_bytes(b"PK\x03\x04")
    (folder / "torn.mp4").write_bytes(bytes(range(64)))
    model = folder / "torn_model"
    shutil.copytree(folder / "tiny" / "made", model)
    (model / "transformer" / "config.json").write_text('{"_class_name": "CogVid')
    weights = (model / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    for name in ("torn_adapter", "torn_run"):
        (folder / name).mkdir()
        (folder / name / "pytorch_lora_weights.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "torn_run" / "config.yaml").write_text("model: [")
    # As an unpacking that ended early leaves it: a folder in a file's place.
    (folder / "torn_folder" / "config.yaml").mkdir(parents=True)
    shutil.copytree(folder / "tiny" / "made", folder / "torn_index", ignore=lambda *_: ["model_index.json"])
    (folder / "torn_index" / "model_index.json").mkdir()
    (folder / "torn_bundle").mkdir()
    (folder / "torn_bundle" / "bundle.json").write_text('{"step": ')
    (folder / "torn_clips").mkdir()
    (folder / "torn_clips" / "metadata.jsonl").write_bytes(b'{"file_name": "a.mp4", "text": "\xc3')


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{verb} torn.yaml" for verb in ("plan", "train", "show", "cache build", "cache stats", "audit")),
        *(f"{verb} {RECIPE} model.path=torn_model data.path=captioned" for verb in ("plan", "audit", "cache build")),
        "doctor --config-file torn.yaml",
        "caption torn_clips",
        "caption captioned --recipe torn.yaml",
        "audit torn_clips",
        "report torn_run",
        "report torn_folder",
        f"plan {RECIPE} model.path=torn_index data.path=captioned",
        "push torn_run me/it --dry-run",
        "verify torn_adapter",
        "sample torn_adapter --prompt x",
        "export torn_adapter --to diffusers --out out",
        "extract torn_adapter/pytorch_lora_weights.safetensors tiny/made --rank 2 --out out",
        "extract torn_model tiny/made --rank 2 --out out",
        "replay torn_bundle",
        "studio torn.yaml",
        "convert opendit out --weights torn.pth",
        "convert videochat2 out --llm torn_model --qformer-tokenizer torn_model --stage torn.pth",
        "quarantine torn_adapter",
    ],
)
def test_a_torn_file_is_named_in_one_line(arguments: str, torn_files: None) -> None:
    # To `verify`, a file that cannot be read is a failed check.
    error = said(arguments, exit_code=1 if arguments.startswith("verify") else 2)
    assert "torn" in error
    assert "\n" not in error
    assert "Errno" not in error
    assert len(error) < 300


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            GatedRepoError,
            "access is gated; accept its terms at https://huggingface.co/me/it, then run: hf auth",
        ),
        (
            RepositoryNotFoundError,
            "https://huggingface.co/me/it does not exist or is private; correct",
        ),
        (
            RevisionNotFoundError,
            "model.revision must be a branch, tag or commit of https://huggingface.co/me/it",
        ),
        (LocalEntryNotFoundError, "check the connection, or try: hf download me/it"),
        (OSError, "and it cannot be downloaded: the Hub's own words"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "audit"])
def test_a_checkpoint_that_the_hub_does_not_give(
    verb: str, kind: type[OSError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        answer = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co/me/it"))
        if kind in (OSError, LocalEntryNotFoundError):
            raise kind("the Hub's own words\nand more")
        raise kind("the Hub's own words", response=answer)  # type: ignore[call-arg]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    error = said(f"{verb} {RECIPE} model.path=me/it data.path=captioned")
    assert error.startswith("model.path: no local folder me/it, and it cannot be downloaded")
    assert message.removeprefix("and it cannot be downloaded: ") in error
    assert "\n" not in error


def test_a_checkpoint_that_is_not_there_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = said(f"plan {RECIPE} model.path=me/it")
    assert "HF_HUB_OFFLINE is set; download it once: HF_HUB_OFFLINE=0 hf download me/it" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: accelerate launch recipes/lora.py RECIPE.yaml"),
        (["smoke_cogvideo.yaml"], f"did you mean {RECIPE}?"),
        ([RECIPE], "create it with dit-lora tiny cogvideox-2b tiny/cogvideox-2b"),
        (
            [RECIPE, MADE, "run.dir=runs/first", "data.path=captioned"],
            "run.dir runs/first already has a run; continue it with train.resume=auto, or choose",
        ),
        ([RECIPE, MADE], "data.path: the folder clips does not exist; put your clips there"),
        ([RECIPE, MADE, "train.resume=runs/x"], "train.resume: runs/x does not exist"),
    ],
)
def test_a_mistake_at_the_launch(arguments: list[str], message: str, lora_main: Callable[[list[str]], None]) -> None:
    with pytest.raises(DitLoraError) as caught:
        lora_main(arguments)
    assert caught.value.exit_code == 2
    assert message in str(caught.value)


@pytest.mark.parametrize(("launched_for", "says"), [("true", False), ("false", True), (None, True)])
def test_a_run_that_wants_a_gpu_and_finds_none_says_where_to_look(
    launched_for: str | None,
    says: bool,
    lora_main: Callable[[list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if launched_for:
        monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", launched_for)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DitLoraError, match="the folder clips does not exist"):
        lora_main([RECIPE, MADE])
    line = next(line for line in capsys.readouterr().err.splitlines() if "1 process on cpu" in line)
    assert line.endswith("torch finds no usable GPU; see dit-lora doctor") == says


def test_a_mistyped_run_that_is_to_be_continued_is_warned_of(
    folder: Path, lora_main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "kitten" / "checkpoints" / "step_000005").mkdir(parents=True)
    with pytest.raises(DitLoraError, match="the folder clips does not exist"):
        lora_main([RECIPE, MADE, "run.dir=runs/kiten", "train.resume=auto"])
    assert "warning: train.resume=auto: runs/kiten does not exist, " in capsys.readouterr().err
