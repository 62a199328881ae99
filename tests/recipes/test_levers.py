"""Offload and compiled blocks in whole runs: they resume, recover, run on two ranks, and what they leave loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import common, with_peft, write_data
from diffusers import CogVideoXPipeline, SanaPipeline
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from launching import ROOT
from runs import adapter, lines, same_adapter, trajectory
from safetensors.torch import load_file

from dit_lora.data.media.media import MediaFile
from dit_lora.training import finish as running
from dit_lora.training.execution import compiled, offload
from dit_lora.training.tasks.chat.answerer import load_answerer

Main = Callable[[list[str]], None]
COMPILED, OFFLOADED = "train.compile=true", "train.offload=group"
STOCK: dict[str, Any] = {"cogvideox": CogVideoXPipeline, "sana": SanaPipeline}
VARIANTS = {
    "cogvideox": "cogvideox-5b",
    "sana": "sana-600m",
    "videochat2": "videochat2-mistral",
    "llava_next_video": "llava-next-video",
    "qwen": "qwen2.5-vl",
    "smolvlm2": "smolvlm2",
}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("chat") / "data")


@pytest.fixture
def recipe_of(
    tiny_checkpoints: dict[str, Path], shape_clips: Path, conversations: Path, tmp_path: Path
) -> Callable[[str], list[str]]:
    """A smoke recipe that validates nothing and saves every second step."""

    def args(name: str) -> list[str]:
        base = tiny_checkpoints[VARIANTS[name]]
        if name not in STOCK:
            return [*common(name, base, conversations, tmp_path), "train.save_every=2"]
        return [
            str(ROOT / "recipes" / "smoke" / f"{name}.yaml"),
            f"model.path={base}",
            f"data.path={shape_clips}",
            f"data.cache={tmp_path / 'cache'}",
            "validation.prompts=[]",
            "validation.eval_draws=0",
            "train.save_every=2",
        ]

    return args


def trained(run: Path) -> dict[str, torch.Tensor]:
    """What its last checkpoint holds, the optimizer's state too."""
    checkpoint = max((run / "checkpoints").glob("step_*"))
    return load_file(checkpoint / "trainable.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def same_state(one: Path, other: Path) -> bool:
    first_state, second_state = trained(one), trained(other)
    return first_state.keys() == second_state.keys() and all(
        torch.equal(first_state[n], second_state[n]) for n in first_state
    )


def loads(run: Path, name: str, base: Path, clip: Path) -> bool:
    """Whether the stock pipeline takes the adapter, or the stock model with it answers as the trained one."""
    if name in STOCK:
        pipe = STOCK[name].from_pretrained(base)
        pipe.load_lora_weights(run / "adapter")
        return bool(pipe.get_active_adapters()) and bool(adapter(run))
    answers = [
        answerer.answer_question(MediaFile(clip), "What shape is it?", max_tokens=4)
        for answerer in (load_answerer(run), with_peft(run))
    ]
    return answers[0] == answers[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", "sana", "videochat2"])
def test_inductor_trains_as_eager_does_and_resumes_with_the_same_bits_from_its_cache(
    lora_main: Main,
    recipe_of: Callable[[str], list[str]],
    tiny_checkpoints: dict[str, Path],
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """VideoChat2's Q-Former draws dropout and drops paths, as in eager mode."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    base, args = tiny_checkpoints[VARIANTS[name]], recipe_of(name)

    def run(folder: str, steps: int, *given: str) -> Path:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        lora_main([*args, f"run.dir={tmp_path / folder}", f"train.steps={steps}", *given])
        return tmp_path / folder

    def counted(event: str) -> int:
        return int(torch._dynamo.utils.counters["inductor"][event])

    plain = run("plain", 4)
    uninterrupted = run("whole", 4, COMPILED)
    assert counted("fxgraph_cache_miss") > 0
    assert any((tmp_path / "cache" / "compile").iterdir())
    run("half", 2, COMPILED)
    half = run("half", 4, COMPILED, "train.resume=auto")
    assert (counted("fxgraph_cache_hit") > 0, counted("fxgraph_cache_miss")) == (True, 0)
    torch.testing.assert_close(trajectory(uninterrupted), trajectory(plain), rtol=1e-3, atol=0)
    assert trajectory(half) == trajectory(uninterrupted)
    assert same_state(half, uninterrupted)
    assert not same_state(uninterrupted, plain)
    assert lines(uninterrupted, "events.jsonl") == []  # compiled to the end
    assert loads(uninterrupted, name, base, next(conversations.rglob("*.mp4")))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["videochat2", "llava_next_video", "qwen", "smolvlm2"])
@pytest.mark.parametrize("given", [OFFLOADED, COMPILED])
def test_a_chat_recipe_trains_resumes_and_loads(
    lora_main: Main,
    recipe_of: Callable[[str], list[str]],
    tiny_checkpoints: dict[str, Path],
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    given: str,
) -> None:
    """Q-Former and encoder draw dropout. Offloaded, with the bits of a run that is not."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compile"))
    args = [*recipe_of(name), "train.checkpointing=auto"]
    uninterrupted, half = tmp_path / "whole", tmp_path / "half"
    lora_main([*args, "train.steps=4", f"run.dir={uninterrupted}", *[given] * (given is COMPILED)])
    lora_main([*args, given, "train.steps=2", f"run.dir={half}"])
    lora_main([*args, given, "train.steps=4", f"run.dir={half}", "train.resume=auto"])
    assert trajectory(half) == trajectory(uninterrupted)
    assert same_state(half, uninterrupted)
    assert lines(half, "events.jsonl") == []
    base = tiny_checkpoints[VARIANTS[name]]
    assert loads(half, name, base, next(conversations.rglob("*.mp4")))


def only_on_the_device(patch: pytest.MonkeyPatch) -> list[bool]:
    """Let no CogVideoX block train with weights that are at home. Counts its computations."""
    loaded_pointers: set[int] = set()
    verify = running.verify_result
    verifying: list[bool] = []
    computed: list[bool] = []
    forward = CogVideoXBlock.forward

    def bring(group: Any, _device: torch.device) -> None:
        group._host_tensors = [parameter.data for parameter in group.parameters]
        for parameter in group.parameters:
            parameter.data = parameter.data.clone()
            loaded_pointers.add(parameter.data_ptr())

    def send_away(group: Any) -> None:
        for parameter, host_tensor in zip(group.parameters, group._host_tensors, strict=True):
            loaded_pointers.remove(parameter.data_ptr())
            parameter.data.fill_(torch.nan)  # for who holds it still
            parameter.data = host_tensor

    def checked(block: Any, *args: Any, **kwargs: Any) -> Any:
        assert block.norm1.linear.weight.data_ptr() in loaded_pointers or verifying
        computed.append(True)
        return forward(block, *args, **kwargs)

    def at_home(*args: Any) -> Any:
        verifying.append(True)  # a fresh model, which has no offloading
        try:
            return verify(*args)
        finally:
            verifying.clear()

    patch.setattr(offload._FrozenBlockWeights, "load_weights_to_device", bring)
    patch.setattr(offload._FrozenBlockWeights, "release_device_weights", send_away)
    patch.setattr(CogVideoXBlock, "forward", checked)
    patch.setattr(running, "verify_result", at_home)
    return computed


@pytest.mark.parametrize("given", [OFFLOADED, pytest.param(COMPILED, marks=pytest.mark.thorough)])
def test_a_nan_in_one_cached_latent_ends_as_a_run_on_a_folder_without_the_clip(
    lora_main: Main,
    poisoned: list[str],
    without: str,
    bad_clip: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compile"))
    computed = only_on_the_device(monkeypatch) if given is OFFLOADED else [True]
    run, never = tmp_path / "run", tmp_path / "never"
    args = [*poisoned, given, "train.checkpointing=auto", "train.steps=4"]
    lora_main([*args, f"run.dir={run}"])
    lora_main([*args, without, f"run.dir={never}"])
    assert computed
    assert same_adapter(run, never)
    assert trajectory(run) == trajectory(never)
    assert not (never / "events.jsonl").exists()
    (event,) = lines(run, "events.jsonl")
    assert (event["step"], event["action"]) == (3, "quarantine")
    assert event["sample_ids"] == [bad_clip]
    assert event["verdict"]["cause"] == "data"
    assert "latent_mean has 1 NaN" in event["verdict"]["words"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("given", [OFFLOADED, COMPILED])
def test_two_ranks_train_as_one_process_does(  # type: ignore[no-untyped-def]
    launch, lora_main: Main, recipe_of: Callable[[str], list[str]], tmp_path: Path, given: str
) -> None:
    """Each rank holds the frozen base in its own host memory, and compiles its own blocks."""
    args = [*recipe_of("cogvideox"), "train.steps=4", "train.checkpointing=auto"]
    one_process, two_ranks = tmp_path / "one", tmp_path / "two"
    result = launch([*args, given, "train.batch_size=1", f"run.dir={two_ranks}"], ranks=2)
    assert result.returncode == 0, result.stderr
    assert "2 processes on cpu, float32" in result.stderr
    lora_main([*args, "train.batch_size=2", f"run.dir={one_process}"])
    torch.testing.assert_close(trajectory(two_ranks), trajectory(one_process), rtol=1e-4, atol=0)
    actual, expected = adapter(two_ranks), adapter(one_process)
    assert actual.keys() == expected.keys()
