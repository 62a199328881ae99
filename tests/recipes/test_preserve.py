"""`train.preserve` in whole runs: it trains, resumes bit for bit, and its captions are named where they are bad."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import lines, same_adapter, trajectory

from benchmarks.faults.media.cache import overwrite
from dit_lora.commands.replay import replay_bundle
from dit_lora.data.cache.cache import TensorCache
from dit_lora.errors import DitLoraError

Main = Callable[[list[str]], None]
PRESERVE = "train.preserve={trigger: red, class_words: painted}"
GUIDED = "train.target=guided"


def test_it_is_trained_and_resumes_bit_for_bit(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    uninterrupted, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    lora_main([*smoke, PRESERVE, "train.steps=4", f"run.dir={uninterrupted}"])
    lora_main([*smoke, PRESERVE, "train.steps=2", f"run.dir={parts}"])
    lora_main([*smoke, PRESERVE, "train.steps=4", f"run.dir={parts}", "train.resume=auto"])
    assert same_adapter(uninterrupted, parts)
    lora_main([*smoke, "train.steps=4", f"run.dir={plain}"])
    ours, theirs = trajectory(uninterrupted), trajectory(plain)
    assert ours[0][:2] == theirs[0][:2]  # a new adapter has moved nothing yet
    assert ours[-1][1] != theirs[-1][1]
    with pytest.raises(DitLoraError, match=r"train\.preserve"):
        lora_main([*smoke, "train.steps=6", f"run.dir={parts}", "train.resume=auto"])


def test_a_guided_target_resumes_bit_for_bit_and_counts_in_the_eval_loss(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    uninterrupted, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    common = [*smoke, "data.caption_dropout=0.5", "validation.eval_draws=1", "validation.eval_clips=1"]
    guided = [*common, GUIDED]
    lora_main([*guided, "train.steps=4", f"run.dir={uninterrupted}"])
    lora_main([*guided, "train.steps=2", f"run.dir={parts}"])
    lora_main([*guided, "train.steps=4", f"run.dir={parts}", "train.resume=auto"])
    assert same_adapter(uninterrupted, parts)
    lora_main([*common, "train.steps=1", f"run.dir={plain}"])
    eval_losses = [lines(run, "eval_loss.jsonl")[0]["eval_loss"] for run in (uninterrupted, plain)]
    assert eval_losses[0] != eval_losses[1]
    with pytest.raises(DitLoraError, match=r"train\.target"):
        lora_main([*guided, "train.guided_scale=2", "train.steps=6", f"run.dir={parts}", "train.resume=auto"])


def test_a_bad_caption_without_the_trigger_is_its_samples_own(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lora_main([*smoke, PRESERVE, "train.steps=1", f"run.dir={tmp_path / 'fill'}"])
    texts = TensorCache(tmp_path / "cache" / "texts")
    entry = next(cached for cached in texts.iter_entries() if "painted" in str(cached.facts["caption"]))
    overwrite(entry, "prompt_embeds", 5, torch.tensor([torch.nan]))
    lora_main([*smoke, PRESERVE, "train.steps=8", f"run.dir={run}"])
    events = [event for event in lines(run, "events.jsonl") if event["action"] != "report"]
    assert events
    assert all(event["verdict"]["cause"] == "data" for event in events)
    assert all("prompt_embeds has 1 NaN" in event["verdict"]["words"] for event in events)
    assert lines(run, "metrics.jsonl")[-1]["step"] == 8
    replayed = replay_bundle(run / events[0]["bundle"])
    assert replayed.diagnosis is not None
    assert replayed.diagnosis.cause == "data"
    assert replayed.diagnosis.sample_ids == tuple(events[0]["sample_ids"])


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (["train.preserve={trigger: sks, class_words: dog}"], "none of . captions contains the trigger"),
        ([PRESERVE, "train.mode=full", "optim.groups.adapter=null"], "needs an adapter"),
        ([PRESERVE, "train.context_parallel=2"], "train.preserve does not work with train.context_parallel"),
        ([GUIDED, "train.mode=full", "optim.groups.adapter=null"], "train.target: guided needs an adapter"),
        ([GUIDED, "train.context_parallel=2"], "train.target: guided does not work with train.context_parallel"),
        ([GUIDED, "optim.groups.backbone.lr=1e-5"], "made from the base's own output, and .* base weights train too"),
        (["train.guided_scale=2"], "no effect without train.target: guided"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    lora_main: Main, smoke: list[str], tmp_path: Path, further: list[str], words: str
) -> None:
    with pytest.raises(DitLoraError, match=words):
        lora_main([*smoke, *further, "train.steps=1", f"run.dir={tmp_path / 'run'}"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "further",
    [
        ["train.checkpointing=full"],
        ["train.checkpointing=selective", "train.accumulate=2"],
        ["train.offload=group", "train.checkpointing=full"],
        ["train.ema=0.5", "data.caption_dropout=0.5", "lora.dropout=0.1"],
        ["model.quantize=int8"],
        ["train.compile=true"],
        ["data.precompute=false"],
        ["kernels.lora_linear=on", "kernels.ada_norm=on"],
        [GUIDED],
    ],
)
def test_it_goes_with_what_a_run_may_have(
    lora_main: Main, smoke: list[str], tmp_path: Path, further: list[str]
) -> None:
    uninterrupted, parts, args = (
        tmp_path / "whole",
        tmp_path / "parts",
        [*smoke, PRESERVE, *further],
    )
    lora_main([*args, "train.steps=3", f"run.dir={uninterrupted}"])
    lora_main([*args, "train.steps=2", f"run.dir={parts}"])
    lora_main([*args, "train.steps=3", f"run.dir={parts}", "train.resume=auto"])
    assert same_adapter(uninterrupted, parts)
    assert not lines(uninterrupted, "events.jsonl")
