"""Samples of the base: equal runs share them by way of the cache, and nothing else does."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import same_adapter

from dit_lora.commands.cache import count_cache_entries
from dit_lora.data.cache.cache import TensorCache, make_entry_key
from dit_lora.families.cogvideox.text_to_video import CogVideoXSampler
from dit_lora.training import choose_checkpointing
from dit_lora.training.check_cache import REUSED
from dit_lora.training.tasks.diffusion import base_samples
from dit_lora.training.tasks.diffusion.base_samples import SAMPLES_CACHE, BaseSampleCache, find_samples_of_prompts

Main = Callable[[list[str]], None]


def test_a_second_run_writes_the_cached_samples_of_its_base(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with another seed. A damaged sample is generated again."""
    seeds: list[int] = []
    generate = CogVideoXSampler.generate_with_sound

    def noting(sampler: Any, pipeline: Any, prompt_kwargs: Any, sampling: Any) -> Any:
        seeds.append(sampling.seed)
        return generate(sampler, pipeline, prompt_kwargs, sampling)

    monkeypatch.setattr(CogVideoXSampler, "generate_with_sound", noting)
    prompt = ["validation.prompts=[a red disc moves]", "validation.inference_steps=1", "validation.count=2"]
    args = [*smoke, *prompt, "train.steps=1", "guard.preflight=false"]

    def run(name: str, *options: str) -> tuple[list[int], list[bytes]]:
        """Seeds of the generated samples, and the samples of the base."""
        seeds.clear()
        lora_main([*args, *options, f"run.dir={tmp_path / name}"])
        files = sorted((tmp_path / name / "samples" / "step_000000").iterdir())
        assert [file.name for file in files] == ["prompt_00.mp4", "prompt_01.mp4"]
        return list(seeds), [file.read_bytes() for file in files]

    all_seeds, first = run("first")
    # Before training, and after it.
    assert all_seeds == [0, 1, 0, 1]
    # So are the bytes of activations.
    checks = tmp_path / "cache" / "preflight_0.json"
    counted = re.sub(r'(?<="words": )"{.*}"', r'"{\\"none\\": 7}"', checks.read_text())
    assert counted != checks.read_text()
    checks.write_text(counted)
    peaks: list[Any] = []
    advise = choose_checkpointing.advise_checkpointing

    def noting_peaks(*arguments: Any) -> Any:
        peaks.append(arguments[0])
        return advise(*arguments)

    monkeypatch.setattr(choose_checkpointing, "advise_checkpointing", noting_peaks)
    assert run("again", "train.seed=7") == ([0, 1], first)
    phases = json.loads((tmp_path / "again" / "phases.json").read_text())
    assert phases["reductions"]["samples at step 0"] == REUSED
    assert peaks == [{"none": 7}]
    assert not same_adapter(tmp_path / "first", tmp_path / "again")

    cache = TensorCache(tmp_path / "cache" / SAMPLES_CACHE)
    damaged = next(entry for entry in cache.iter_entries() if entry.sample == "sample 1")
    with damaged.path.open("r+b") as file:
        file.seek(damaged.start)
        file.write(bytes(8))
    assert run("damaged") == ([1, 0, 1], first)

    facts = damaged.facts
    assert facts["checkpoint"].keys() >= {"model_index.json", "scheduler", "text_encoder", "transformer", "vae"}
    assert facts["sampling"] | {"seed": 1, "guidance_scale": 6.0, "inference_steps": 1} == facts["sampling"]
    assert count_cache_entries(str(tmp_path / "cache"), []).record()["samples"]["entries"] == 2
    text_keys = {entry.key for entry in TensorCache(tmp_path / "cache" / "texts").iter_entries()}
    prompt_keys = {key for entry in cache.iter_entries() for key in entry.facts["prompt"]}
    assert len(find_samples_of_prompts(cache, text_keys)) == 2
    assert find_samples_of_prompts(cache, text_keys - prompt_keys) == set()


def test_the_oldest_samples_go_when_the_cache_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "sample.png", TensorCache(tmp_path / SAMPLES_CACHE)
    facts = [{"number": number} for number in range(4)]
    file.write_bytes(bytes(5000))
    monkeypatch.setattr(base_samples, "MAX_CACHE_BYTES", 12_000)
    for number in range(4):
        samples = BaseSampleCache(cache, facts)
        samples.add_new_sample(number, file)
        samples.write_new_samples()
        os.utime(cache.find_shard_path(make_entry_key(facts[number])), (number, number))
    restored = [
        BaseSampleCache(TensorCache(cache.root), facts).restore_cached_sample(n, tmp_path / f"copy_{n}")
        for n in range(4)
    ]
    assert restored == [False, False, True, True]
    assert (tmp_path / "copy_3.png").read_bytes() == file.read_bytes()
    # As `guard.preflight=anew` does.
    BaseSampleCache(cache, facts).mark_cached_samples_bad()
    assert not BaseSampleCache(TensorCache(cache.root), facts).restore_cached_sample(3, tmp_path / "copy_3")
