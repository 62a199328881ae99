"""Chat recipes, end to end: they train, resume bit for bit, are asked and exported, and learn what is shown."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import (
    CLIPS,
    QA,
    Main,
    answers_of,
    common,
    smokes,
    state,
    with_peft,
    without_dropout,
    write_band_questions,
    write_data,
    write_small_clips,
)
from launching import ROOT
from runs import lines, require_short_log
from safetensors.torch import load_file
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.load import load_recipe
from dit_lora.data.media.video import ClipError
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES
from dit_lora.training.tasks.chat import training_set
from dit_lora.training.tasks.chat.answerer import find_origin, load_answerer

VARIANTS = {
    "videochat2": "videochat2-mistral",
    "llava_next_video": "llava-next-video",
    "qwen": "qwen2.5-vl",
    "smolvlm2": "smolvlm2",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations.json about clips, images and nothing, and held_out.json."""
    return write_data(tmp_path_factory.mktemp("chat") / "data")


@pytest.fixture
def videochat2(tiny_checkpoints: dict[str, Path], data: Path, tmp_path: Path) -> list[str]:
    return common("videochat2", tiny_checkpoints["videochat2-mistral"], data, tmp_path)


def test_every_smoke_recipe_of_a_chat_family_is_tried_here() -> None:
    assert set(VARIANTS) == set(smokes())


def test_every_chat_family_has_a_smoke_recipe() -> None:
    families = {load_recipe(path).model.family for path in smokes().values()}
    assert families == set(CHAT_FAMILIES)


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # The two others are checkpoints of Transformers, as Qwen's are.
    [pytest.param(name, marks=() if name in ("videochat2", "qwen") else pytest.mark.thorough) for name in VARIANTS],
)
def test_a_smoke_recipe_trains_resumes_answers_and_exports(
    name: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2 and 2 resumed steps equal 4, bit for bit, with frames and crops by chance, clips, images and text."""
    base, question = tiny_checkpoints[VARIANTS[name]], "What shape is it?"
    clip = data / CLIPS[0]
    args = [
        *common(name, base, data, tmp_path),
        "kernels.lora_linear=on",
        f"validation.prompts={json.dumps([question])}",
        f"validation.media=[{clip}]",
        f"validation.conversations={data / 'held_out.json'}",
        "validation.max_answer_tokens=4",
    ]
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    capsys.readouterr()
    lora_main([*args, f"run.dir={uninterrupted}", "train.steps=4"])
    require_short_log(capsys.readouterr().err, uninterrupted)
    # The run above compares kernels before its first step and after its last.
    args += ["guard.preflight=false", "guard.parity_every=0"]
    lora_main([*args, f"run.dir={parts}", "train.steps=2"])
    lora_main([*args, f"run.dir={parts}", "train.steps=4", "train.resume=auto"])
    assert state(parts, 4) == state(uninterrupted, 4)
    if name == "videochat2":
        require_refused_change(lora_main, [*args, f"run.dir={parts}", "train.steps=6", "train.resume=auto"], data)
    kinds = {kind for line in lines(uninterrupted, "metrics.jsonl") for kind in line["loss_by_media"]}
    assert len(kinds) > 1
    eval_losses = [(line["step"], line["eval_loss"]) for line in lines(uninterrupted, "eval_loss.jsonl")]
    assert [step for step, _ in eval_losses] == [0, 4]
    assert eval_losses[0][1] != eval_losses[1][1]
    assert lines(parts, "eval_loss.jsonl")[-1]["eval_loss"] == eval_losses[1][1]
    written = json.loads((uninterrupted / "samples" / "step_000004" / "answers.json").read_text())
    assert [answer["prompt"] for answer in written] == [question]

    output = invoke("chat", uninterrupted, "--video", clip, "--prompt", question, "--max-tokens", 4)
    assert output.rstrip("\n") == written[0]["answer"]
    invoke("export", uninterrupted, "--out", tmp_path / "merged")
    _the_merged_checkpoint_is_the_trained_model(uninterrupted, tmp_path / "merged", base, clip)


def require_refused_change(lora_main: Main, args: list[str], data: Path) -> None:
    """A run does not go on with other validation conversations: its eval losses could not be compared."""
    changed = data / "held_out_changed.json"
    changed.write_text((data / "held_out.json").read_text().replace("4.", "5."))
    with pytest.raises(DitLoraError, match=r"belongs to another recipe(.|\n)*validation\.conversations"):
        lora_main([*args, f"validation.conversations={changed}"])


def _the_merged_checkpoint_is_the_trained_model(run: Path, merged: Path, base: Path, clip: Path) -> None:
    from dit_lora.data.chat.conversation import Conversation, Turn
    from dit_lora.data.media.media import MediaFile

    logits = []
    for target in (run, merged, base):
        answerer = load_answerer(target, frames=4)
        answerer.checkpoint = answerer.checkpoint.copy_with_vision_settings(
            load_answerer(run).checkpoint.vision_settings
        )
        media = answerer.read_media(MediaFile(clip))
        about = Conversation("", "video", None, (Turn("What shape is it?", "A disc.", "Look."),))
        rendered = answerer.checkpoint.tokenize_conversation(about, media.shape, media.seconds)
        batch = {
            "input_ids": torch.tensor([rendered.ids]),
            "seconds": torch.tensor([media.seconds]),
        }
        assert media.pixels is not None
        batch["pixels"] = media.pixels[None]
        if rendered.instruction:
            batch["instruction_ids"] = torch.tensor([rendered.instruction])
            batch["instruction_mask"] = torch.ones_like(batch["instruction_ids"])
        with torch.no_grad():
            logits.append(answerer.model(**answerer.checkpoint.build_model_inputs(batch)).logits)
    trained, exported, untrained = logits
    torch.testing.assert_close(exported, trained, rtol=1e-4, atol=1e-4)
    assert (trained - untrained).abs().max() > 0.01


def test_base_groups_train_alone(lora_main: Main, videochat2: list[str], data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = [*videochat2, f"run.dir={run}", "train.steps=3", "optim.groups.adapter=null", "lora={}"]
    with pytest.raises(DitLoraError, match=r"conversations\.json#7: it is text only") as refused:
        lora_main(args)
    assert str(refused.value).count("it is text only") == 3
    lora_main([*args, "data.rejects=skip"])
    assert [path.name for path in (run / "adapter").iterdir()] == ["base_weights.safetensors"]
    trained = {name.split(".")[1] for name in load_file(run / "adapter/base_weights.safetensors")}
    assert trained == {
        "projection",
        "query_tokens",
        "extra_query_tokens",
        "qformer",
        "vision_encoder",
        "vision_layernorm",
    }
    invoke("chat", run, "--video", data / CLIPS[0], "--prompt", "What?", "--max-tokens", 2)


def test_the_average_of_the_weights_is_what_is_saved(lora_main: Main, videochat2: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora_main([*videochat2, f"run.dir={run}", "train.steps=3", "train.ema=0.9"])
    folder = run / "checkpoints" / "step_000003"
    average, trained = (load_file(folder / f"{name}.safetensors") for name in ("ema", "trainable"))
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    saved |= load_file(run / "adapter" / "base_weights.safetensors")
    for name in ("lm_head.lora_B.default.weight", "model.query_tokens"):
        (averaged_tensor,) = (tensor for key, tensor in average.items() if key.endswith(name))
        inside = f"base_model.model.{name.replace('.default.', '.')}"
        saved_tensor = saved[name] if name in saved else saved[inside]
        assert torch.equal(saved_tensor, averaged_tensor)
        assert not torch.equal(saved_tensor, trained[name])
    # The save of the same step has the same two files, and `chat` finds its base in the run.
    at_save = load_file(folder / "adapter_model.safetensors") | load_file(folder / "base_weights.safetensors")
    assert all(torch.equal(tensor, at_save[name]) for name, tensor in saved.items())
    origin = find_origin(folder, None)
    assert (origin.adapter, origin.model) == (folder, find_origin(run, None).model)


def test_samples_that_cannot_be_used_are_refused_in_one_list_or_left_out(
    lora_main: Main, videochat2: list[str], data: Path, tmp_path: Path
) -> None:
    records = json.loads((data / "conversations.json").read_text())
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "broken.mp4").write_bytes((data / CLIPS[0]).read_bytes()[:300])
    shutil.copytree(data, bad, dirs_exist_ok=True)
    long = {"QA": [{"q": "Tell.", "a": "word " * 300}]}
    records += [{"video": name, "QA": [{"q": "What?", "a": "It."}]} for name in ("broken.mp4", "gone.mp4")]
    (bad / "conversations.json").write_text(json.dumps([*records, {"video": CLIPS[1], **long}]))
    run = tmp_path / "run"
    args = [
        *videochat2,
        f"data.path={bad / 'conversations.json'}",
        f"run.dir={run}",
        "train.steps=2",
    ]
    with pytest.raises(DitLoraError) as refused:
        lora_main(args)
    for message in (
        "broken.mp4",
        f"no such file: {bad / 'gone.mp4'}",
        f"{CLIPS[1]}#2",
        "chat.max_tokens is",
    ):
        assert message in str(refused.value)
    assert not (run / "metrics.jsonl").exists()
    lora_main([*args, "data.rejects=skip"])
    assert len(lines(run, "metrics.jsonl")) == 2
    (event,) = lines(run, "events.jsonl")
    assert set(event["sample_ids"]) == {"broken.mp4", "gone.mp4", f"{CLIPS[1]}#2"}
    assert "broken.mp4" in (run / "report.html").read_text()


def test_a_clip_that_breaks_while_it_trains_is_left_out_and_named(
    lora_main: Main, videochat2: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps go on with other samples, as if it had never been there."""
    run, read = tmp_path / "run", training_set.read_frames_at

    def broken(media: Any, *rest: Any, **how: Any) -> torch.Tensor:
        if media.name.endswith(Path(CLIPS[2]).name):
            raise ClipError(f"{media.name}: cannot be decoded to its end: it broke")
        return read(media, *rest, **how)

    monkeypatch.setattr(training_set, "read_frames_at", broken)
    args = [*videochat2, "train.steps=8", "guard.preflight=false", "train.batch_size=1"]
    lora_main([*args, f"run.dir={run}"])
    (event,) = lines(run, "events.jsonl")
    assert event["sample_ids"] == [CLIPS[2]]
    assert "it broke" in json.dumps(event)
    assert len(lines(run, "metrics.jsonl")) == 8
    monkeypatch.undo()
    assert CLIPS[2] in (run / "report.html").read_text()


@pytest.mark.slow
def test_two_ranks_with_half_the_batch_each_train_alike(  # type: ignore[no-untyped-def]
    launch, lora_main: Main, tiny_checkpoints: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Same losses, gradient norms and eval loss, text among the steps, connector and backbone training."""
    base = without_dropout(tiny_checkpoints["videochat2-mistral"], tmp_path / "base")
    args = [
        *common("videochat2", base, data, tmp_path),
        "train.steps=8",
        f"validation.conversations={data / 'held_out.json'}",
    ]
    result = launch([*args, "train.batch_size=2", f"run.dir={tmp_path / 'two'}"], ranks=2)
    assert result.returncode == 0, result.stderr
    lora_main([*args, "train.batch_size=2", "train.accumulate=2", f"run.dir={tmp_path / 'one'}"])
    one_process, two_ranks = (lines(tmp_path / run, "metrics.jsonl") for run in ("one", "two"))
    assert {kind for line in one_process for kind in line["loss_by_media"]} == {
        "text",
        "image",
        "video",
    }
    assert [line["samples"] for line in one_process] == [line["samples"] for line in two_ranks]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in two_ranks] == pytest.approx([line[name] for line in one_process], rel=1e-4)
    eval_losses = [line["eval_loss"] for run in ("one", "two") for line in lines(tmp_path / run, "eval_loss.jsonl")]
    assert eval_losses[:2] == pytest.approx(eval_losses[2:], rel=1e-4)


def overfit(lora_main: Main, args: list[str], folder: Path, run: Path, steps: int) -> None:
    """Train on folder/qa.json until each answer comes back word for word, by our loader and by PEFT's."""
    lora_main(
        [
            *args,
            f"data.path={folder / 'qa.json'}",
            f"run.dir={run}",
            f"train.steps={steps}",
            "train.batch_size=8",
            "train.save_every=1000",
            "chat.frames=middle",
            "chat.crop=1",
            "lora.rank=16",
            "lora.alpha=32",
            "optim.schedule=cosine",
            "optim.groups.adapter.lr=1e-2",
            "optim.groups.connector.lr=1e-2",
            "optim.groups.backbone.lr=1e-3",
            "guard.monitor_every=0",
        ]
    )
    records = json.loads((folder / "qa.json").read_text())
    expected = [turn["a"] for record in records for turn in record["QA"]]
    assert len(expected) == 8
    tuned = load_answerer(run)
    assert answers_of(tuned, folder, records) == expected
    assert answers_of(with_peft(run), folder, records) == expected
    # Nothing of it is the base's, and without the picture most of it cannot be known.
    base = load_answerer(Path(load_recipe(run / "config.yaml").model.path))
    base.checkpoint = tuned.checkpoint
    assert not set(answers_of(base, folder, records)) & set(expected)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tiny_model_overfits_eight_answers_about_coloured_bands(
    lora_main: Main, videochat2: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "bands"
    write_band_questions(folder)
    overfit(lora_main, videochat2, folder, tmp_path / "run", steps=70)


@pytest.mark.slow
@pytest.mark.thorough  # the same in more steps; the clips are not part of the repository
def test_a_tiny_model_overfits_eight_answers_about_real_clips(
    lora_main: Main, videochat2: list[str], tmp_path: Path
) -> None:
    clips = ROOT.parent / "shared" / "data" / "clips"
    if not clips.is_dir():
        pytest.skip(f"no clips in {clips}")
    write_small_clips(clips, tmp_path / "small", QA)
    overfit(lora_main, videochat2, tmp_path / "small", tmp_path / "run", steps=120)
