"""The verbs of `dit-lora` for chat models: show, chat and export, on a tiny checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_runs import CLIPS, write_data
from family_cases.chat import adapted, open_chat
from safetensors.torch import load_file
from typer.testing import CliRunner

from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.cli.app import app
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError
from dit_lora.training.tasks.chat.answerer import load_answerer


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("chat") / "data")


@pytest.fixture
def base(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["videochat2-mistral"]


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """Of a model with base weights that trained too."""
    model = adapted(open_chat(base.name, base))
    metadata = {
        "family": "videochat2",
        "base_model": str(base),
        "viewing": {"frames": 4, "height": 32, "width": 32},
    }
    save_chat_adapter(model, tmp_path / "adapter", metadata)
    return tmp_path / "adapter"


@pytest.fixture
def recipe(base: Path, data: Path, tmp_path: Path) -> Path:
    values: dict[str, Any] = {
        "model": {"family": "videochat2", "path": str(base)},
        "data": {"path": str(data / "conversations.json"), "frames": 4, "height": 32, "width": 32},
        "chat": {},
        "train": {"steps": 2},
        "run": {"dir": str(tmp_path / "run")},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_show_has_the_tokens_of_a_sample_and_a_page_with_its_frames(recipe: Path, tmp_path: Path) -> None:
    output = invoke("show", recipe, "--html", tmp_path / "page.html")
    assert output.splitlines()[0].strip() == CLIPS[0]
    assert "learned" in output
    assert "To the right. </s>" in " ".join(output.split())
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/") == 4
    assert CLIPS[0] in page
    assert invoke("show", recipe, "--sample", CLIPS[0]) == output


def test_show_draws_as_training_does(recipe: Path) -> None:
    outputs = [invoke("show", recipe, "--draw", draw) for draw in (0, 1, 0)]
    assert outputs[0] == outputs[2] != outputs[1]
    assert outputs[0] != invoke("show", recipe)


def test_show_says_which_samples_there_are_and_why_one_cannot_be_used(
    recipe: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DitLoraError, match="no sample 99; the first of 9 are") as error:
        invoke("show", recipe, "--sample", 99)
    assert f"0: {CLIPS[0]}" in str(error.value)
    records = [*json.loads((data / "conversations.json").read_text())]
    records.append({"video": "gone.mp4", "QA": [{"q": "What?", "a": "It."}]})
    path = tmp_path / "some.json"
    path.write_text(json.dumps(records))
    with pytest.raises(DitLoraError, match=r"gone\.mp4: no such file"):
        invoke("show", recipe, f"data.path={path}", f"data.media={data}", "--sample", "gone.mp4")


def test_chat_answers_as_the_model_does_turn_after_turn(adapter: Path, data: Path) -> None:
    clip = data / CLIPS[0]
    options = ["--prompt", "What is it?", "--prompt", "Why?", "--max-tokens", 4]
    answers = invoke("chat", adapter, "--video", clip, *options).splitlines()
    answerer = load_answerer(adapter)
    answer = answerer.answer_question(MediaFile(clip), "What is it?", max_tokens=4)
    assert answers[0] == answer
    base = answerer.checkpoint.path
    base_lines = invoke("chat", base, "--video", clip, *options).splitlines()
    assert base_lines[0] != answers[0]
    instructed_output = invoke("chat", adapter, "--video", clip, *options, "--instruction", "Watch it.")
    assert instructed_output.splitlines()[0] != answers[0]


def test_chat_takes_one_file_that_is_there(adapter: Path, data: Path) -> None:
    media_options = ["--video", data / CLIPS[0], "--image", data / CLIPS[0]]
    with pytest.raises(DitLoraError, match="got both --video and --image"):
        invoke("chat", adapter, *media_options, "--prompt", "What?")
    with pytest.raises(DitLoraError, match=r"gone\.mp4 does not exist"):
        invoke("chat", adapter, "--video", data / "gone.mp4", "--prompt", "What?")


def test_export_writes_a_checkpoint_that_is_the_tuned_model(adapter: Path, base: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "merged"
    assert str(output_dir) in invoke("export", adapter, "--out", output_dir)
    merged, tuned = load_answerer(output_dir), load_answerer(adapter)
    ids = torch.tensor([[1, 5, 9, 33], [1, 60, 2, 7]])
    with torch.no_grad():
        expected = tuned.model(input_ids=ids).logits
        torch.testing.assert_close(merged.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    names = {name for file in output_dir.glob("*.safetensors") for name in load_file(file)}
    assert names == {name for file in base.glob("*.safetensors") for name in load_file(file)}
    repeated_out = ("--out", tmp_path / "again")
    with pytest.raises(DitLoraError, match="is neither an adapter nor a run with one"):
        invoke("export", base, *repeated_out)
    with pytest.raises(DitLoraError, match="which is already in PEFT's format"):
        invoke("export", adapter, "--to", "peft", *repeated_out)
    with pytest.raises(DitLoraError, match="--to kohya is for diffusion models"):
        invoke("export", adapter / "adapter_model.safetensors", "--to", "kohya", *repeated_out)
    with pytest.raises(DitLoraError, match="are for diffusion models; give one adapter"):
        invoke("export", adapter, adapter, *repeated_out)


def test_verbs_of_diffusion_and_of_chat_send_to_each_other(recipe: Path, adapter: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        with pytest.raises(DitLoraError) as error:
            invoke(*arguments)
        return str(error.value)

    assert "nothing to build" in refused("cache", "build", recipe)
    assert "nothing to build" in refused("cache", "prune", recipe, "--keep", recipe)
    assert "use dit-lora chat" in refused("sample", adapter, "--prompt", "a disc")
    assert "--encode does not apply to chat models" in refused("audit", recipe, "--encode")
    diffusion = tmp_path / "diffusion"
    diffusion.mkdir()
    values = yaml.safe_load(recipe.read_text())
    del values["chat"]
    values["model"]["family"], values["data"]["fps"] = "cogvideox", 8
    (diffusion / "config.yaml").write_text(yaml.safe_dump(values))
    message = refused("chat", diffusion, "--prompt", "x")
    assert "cogvideox, which is not a chat model; use dit-lora sample" in message
