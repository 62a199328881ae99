"""No code of a checkpoint runs, whatever its configs ask for and whoever says yes; the end is one line."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.environment.pretrained import build_from_config, load_pretrained
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
        pytest.param("cogvideox", "train", True, marks=pytest.mark.thorough),
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
        conversation = [{"from": "human", "value": "A disc?"}, {"from": "gpt", "value": "Yes."}]
        (tmp_path / "told.json").write_text(json.dumps([{"conversations": conversation}]))
        recipe.append(f"data.path={tmp_path / 'told.json'}")
    with pytest.raises(DitLoraError) if needs_it else nullcontext() as error:
        if command == "train":
            lora_main(recipe)
        else:
            CliRunner().invoke(app, [command, *recipe], input="y\n" * 99, catch_exceptions=False)
    assert not list(tmp_path.rglob("ran"))
    if error is None:
        return
    assert error.value.exit_code == 2
    assert "needs its own code, which dit-lora never runs" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("yes")
def test_nor_by_a_pipeline_whose_index_names_it(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import CogVideoXPipeline

    model = shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "model")
    asking(model / "vae")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "vae": ["evil", "Vae"]}))
    with pytest.raises(DitLoraError, match="needs its own code"):
        load_pretrained(CogVideoXPipeline, model)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.usefixtures("yes")
def test_nor_by_a_conversion(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The language model's folder is somebody else's too."""
    from dit_lora.models.videochat2.convert import _load_tokenizers, _read_text_config

    llm = shutil.copytree(tiny_checkpoints["videochat2-phi3"], tmp_path / "llm")
    asking(llm, **TOKENIZER)
    with pytest.raises(DitLoraError, match="needs its own code"):
        _load_tokenizers(llm, llm / "qformer_tokenizer")
    asking(llm, **CONFIG)
    with pytest.raises(DitLoraError, match="needs its own code"):
        _read_text_config(llm, "phi", None)
    assert not list(tmp_path.rglob("ran"))


KERNEL = "someone/evil-attention"


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"text_config": {"attn_implementation": f"paged|{KERNEL}@main:run"}},
        {"attn_implementation": {"text_config": KERNEL}},
        {"configuration_files": ["config.1.0.0.json"]},
    ],
)
def test_attention_from_the_hub_is_code_too(values: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = {"model_type": "qwen2_5_vl", **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    second = {"model_type": "qwen2_5_vl", "_attn_implementation": KERNEL}
    (tmp_path / "config.1.0.0.json").write_text(json.dumps(second))
    with pytest.raises(DitLoraError, match=r"evil-attention.* is code from the Hub"):
        load_pretrained(AutoConfig, tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of `kernels`, as if it were installed."""
    import transformers.modeling_utils
    from transformers.integrations import hub_kernels

    names: list[str] = []

    def get_kernel(name: str, **_: Any) -> None:
        names.append(name)
        raise RuntimeError(f"asked for {name}")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", get_kernel, raising=False)
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    return names


TEXT = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_flash_attention_of_a_config_is_not_fetched(key: str, asked: list[str], tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen2ForCausalLM

    from dit_lora.families.without_weights import build_text_encoders

    folder = tmp_path / "text_encoder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TEXT, key: "flash_attention_2"}))
    with pytest.raises((RuntimeError, ImportError)):
        Qwen2ForCausalLM._from_config(AutoConfig.from_pretrained(folder))
    assert asked  # Transformers by itself does
    asked.clear()
    built = build_from_config(AutoModelForCausalLM, load_pretrained(AutoConfig, folder))
    built.save_pretrained(folder / "saved")
    saved_config = json.loads((folder / "saved" / "config.json").read_text())
    (folder / "saved" / "config.json").write_text(json.dumps({**saved_config, key: "flash_attention_2"}))
    loaded_model = load_pretrained(Qwen2ForCausalLM, folder / "saved", use_safetensors=True)
    for model in (built, loaded_model, *build_text_encoders(tmp_path, torch.float32)):
        assert model.config._attn_implementation in ("sdpa", "eager")
    assert not asked


def test_nor_is_a_kernel_that_an_architecture_loads_by_itself(asked: list[str], tmp_path: Path) -> None:
    """A constructor of Transformers asks for it, whatever the config holds."""
    from transformers import AutoConfig
    from transformers.integrations.hub_kernels import get_kernel

    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    config = load_pretrained(AutoConfig, tmp_path)

    class Asking:
        @classmethod
        def from_config(cls, config: Any, **_: Any) -> None:
            get_kernel("kernels-community/yoso", version=1)

    with pytest.raises(DitLoraError, match="ImportError"):
        build_from_config(Asking, config)
    assert not asked


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "nunchaku_lite", None, 7])
def test_quantization_that_fetches_kernels_is_refused(method: Any, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL
    from transformers import AutoConfig

    config = {**TEXT, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for kind in (AutoConfig, AutoencoderKL):
        with pytest.raises(DitLoraError, match="may fetch kernels from the Hub"):
            load_pretrained(kind, tmp_path)


def test_quantization_by_bitsandbytes_is_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = {**TEXT, "quantization_config": {"load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_pretrained(AutoConfig, tmp_path).quantization_config == {"load_in_4bit": True}


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    for source in (Path("model/tokenizer"), "model/tokenizer", tmp_path / "model"):
        with pytest.raises(DitLoraError, match=r"the folder .*model.* does not exist"):
            load_pretrained(AutoTokenizer, source)


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    """Whatever Transformers and tokenizers raise, its own `Exception` too."""
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    damaged = {
        "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE"}}',
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "config.json": '{"model_type": "qwen2", "num_attention_heads": "x"}',
    }
    for name, text in damaged.items():
        (tmp_path / name).write_text(text)
    for kind in (AutoTokenizer, PreTrainedTokenizerFast, AutoConfig):
        with pytest.raises(DitLoraError, match=r"cannot load .* its files may be damaged") as error:
            load_pretrained(kind, tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "num_hidden_layers": 10**9}))
    with pytest.raises(DitLoraError, match="num_hidden_layers is 1,000,000,000, more than 10,000"):
        load_pretrained(AutoConfig, tmp_path)
