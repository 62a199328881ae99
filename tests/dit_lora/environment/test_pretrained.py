"""No code of a checkpoint runs, whatever its configs ask for and whoever says yes; the end is one line."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError

EVIL = """
import pathlib
pathlib.Path({ran!r}).write_text("ran")
from transformers import PreTrainedConfig as Config, PreTrainedModel as Model, PreTrainedTokenizer as Tokenizer
from diffusers import AutoencoderKLCogVideoX as Vae
"""
SHARE = ["data.height=32", "data.width=48", "validation.prompts=[]", "train.steps=1"]


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody, or `yes |`, answers every question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 1000))


def asking(folder: Path, **values: Any) -> None:
    """A config that asks for evil.py beside it, under a name that no library has."""
    (folder / "evil.py").write_text(EVIL.format(ran=str(folder.parent / "ran")))
    name = "tokenizer_config.json" if "tokenizer_class" in values else "config.json"
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**config, **values}))
    (folder / "__init__.py").write_text("")


TOKENIZER = {
    "tokenizer_class": "EvilTokenizer",
    "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
}
CONFIG = {
    "model_type": "evil",
    "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
}


@pytest.mark.usefixtures("yes")
@pytest.mark.parametrize(
    ("family", "command", "needs_it"),
    [
        ("cogvideox", "audit", True),
        ("cogvideox", "plan", True),
        ("videochat2", "audit", True),
        ("videochat2", "train", True),
        # Transformers and Diffusers have classes of their own for these, and take them.
        ("qwen", "audit", False),
        pytest.param("cogvideox", "train", False, marks=pytest.mark.thorough),
    ],
)
def test_code_of_a_checkpoint_is_not_run_by_any_verb(
    family: str,
    command: str,
    needs_it: bool,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path: Path,
) -> None:
    variant = {"cogvideox": "cogvideox-2b", "qwen": "qwen2.5-vl", "videochat2": "videochat2-phi3"}
    model = shutil.copytree(tiny_checkpoints[variant[family]], tmp_path / "model")
    asking(model / "tokenizer" if family == "cogvideox" else model, **TOKENIZER)
    if (model / "text_encoder").is_dir():
        asking(model / "text_encoder", **CONFIG)
    root = Path(__file__).parents[3]
    recipe = [
        str(root / "recipes" / "smoke" / f"{family}.yaml"),
        f"model.path={model}",
        f"data.cache={tmp_path / 'cache'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    if family == "cogvideox":
        recipe += [f"data.path={shape_clips}", *SHARE]
    else:
        told = [{"from": "human", "value": "A disc?"}, {"from": "gpt", "value": "Yes."}]
        (tmp_path / "told.json").write_text(json.dumps([{"conversations": told}]))
        recipe.append(f"data.path={tmp_path / 'told.json'}")
    with pytest.raises(DitLoraError) if needs_it else nullcontext() as refused:
        if command == "train":
            lora_main(recipe)
        else:
            CliRunner().invoke(app, [command, *recipe], input="y\n" * 99, catch_exceptions=False)
    assert not list(tmp_path.rglob("ran"))
    if refused is None:
        return
    assert refused.value.exit_code == 2
    assert "can only be loaded by code of its own, which is never run" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("yes")
def test_nor_by_a_pipeline_whose_index_names_it(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from diffusers import CogVideoXPipeline

    model = shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "model")
    asking(model / "vae")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "vae": ["evil", "Vae"]}))
    with pytest.raises(DitLoraError, match="by code of its own"):
        load_pretrained(CogVideoXPipeline, model)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.usefixtures("yes")
def test_nor_by_a_conversion(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The language model's folder is somebody else's too."""
    from dit_lora.models.videochat2.convert import _text_config, _tokenizers

    llm = shutil.copytree(tiny_checkpoints["videochat2-phi3"], tmp_path / "llm")
    asking(llm, **TOKENIZER)
    with pytest.raises(DitLoraError, match="by code of its own"):
        _tokenizers(llm, llm / "qformer_tokenizer")
    asking(llm, **CONFIG)
    with pytest.raises(DitLoraError, match="by code of its own"):
        _text_config(llm, "phi", None)
    assert not list(tmp_path.rglob("ran"))


def test_attention_from_the_hub_is_code_too(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    model = shutil.copytree(tiny_checkpoints["qwen2.5-vl"], tmp_path / "model")
    asking(model, attn_implementation="someone/evil-attention")
    with pytest.raises(DitLoraError, match="'someone/evil-attention' is code from the Hub"):
        load_pretrained(AutoConfig, model)


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    for source in (Path("model/tokenizer"), "model/tokenizer", tmp_path / "model"):
        with pytest.raises(DitLoraError, match=r"no folder .*model"):
            load_pretrained(AutoTokenizer, source)
