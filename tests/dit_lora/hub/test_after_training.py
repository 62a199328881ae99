"""A run that pushes at its end: refused before it trains, complete if the push fails, and loaded from the Hub."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers.utils
import pytest
import torch
import yaml
from card_rules import card_problems, metadata
from fake_hub import Account, FakeHub, Fault
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from dit_lora.config.load import load_recipe
from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.data.synthetic.pairs import write_edit_pairs
from dit_lora.environment.pipeline_index import MODULAR_INDEX_FILE, set_component_source
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES
from dit_lora.numerics.adapter_tensors import is_adapter_tensor

Main = Callable[[list[str]], None]
SMOKE = Path(__file__).parents[3] / "recipes" / "smoke"
REPO = "me/mine"
EDITS = ("flux_kontext", "flux2_edit")
EDITED_CLIPS = "ltx2_ic_lora"
BY_CLASS = ("dit", "dit_scratch", "video_dit", "video_dit_lora")


def data_of(name: str, folder: Path) -> Path:
    """What a smoke recipe's data.path can be."""
    recipe = load_recipe(SMOKE / f"{name}.yaml")
    size: dict[str, Any] = {"height": 64, "width": 64, "fps": 8}
    if recipe.model.family in CHAT_FAMILIES:
        write_conversations(folder, clips=2, images=1, frames=9, **size)
        return folder / "conversations.json"
    if name in EDITS:
        write_edit_pairs(folder, pairs=2, height=64, width=64)
    elif name in BY_CLASS:
        write_class_folders(folder, images=4, frames=recipe.data.frames, **size)
    elif name == EDITED_CLIPS:
        write_edit_pairs(folder, pairs=2, height=64, width=64, frames=9)
    else:
        write_shapes(folder, clips=2, frames=9 if recipe.data.frames > 1 else 1, **size)
    return folder


def arguments(name: str, hub: FakeHub, bases: dict[str, Path], tmp_path: Path) -> list[str]:
    """A smoke recipe of one step on a base that the Hub has, which pushes."""
    recipe = load_recipe(SMOKE / f"{name}.yaml")
    variant = Path(recipe.model.path).name
    base = bases[variant]
    files = [path for path in base.rglob("*") if path.is_file()]
    contents = {p.relative_to(base).as_posix(): p.read_bytes() for p in files}
    if MODULAR_INDEX_FILE in contents:
        # On the Hub, an index names the repository of each component.
        index = set_component_source(json.loads(contents[MODULAR_INDEX_FILE]), f"acme/{variant}")
        contents[MODULAR_INDEX_FILE] = json.dumps(index).encode()
    hub.add(f"acme/{variant}", contents)
    is_chat = recipe.model.family in CHAT_FAMILIES
    quick_options = ["validation.media=[]"] if is_chat else ["validation.inference_steps=2"]
    return [
        *(str(SMOKE / f"{name}.yaml"), *quick_options),
        f"model.path=acme/{variant}",
        f"data.path={data_of(name, tmp_path / 'data')}",
        "train.steps=1",
        "validation.prompts=[]",
        "validation.references=[]",
        "validation.eval_draws=0",
        "hub.push=true",
        f"hub.repo_id={REPO}",
        f"run.dir={tmp_path / 'run'}",
    ]


def paste(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the card's Python as it is pasted, and return its names; videos are neither read nor encoded."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(folder)
    for name in ("first_frame.png", "last_frame.png", "reference_1.png"):
        Image.new("RGB", (96, 64), "red").save(name)
    scope: dict[str, Any] = {}

    def export(frames: Any, path: str, fps: int) -> None:
        scope["shown"] = (frames, path, fps)

    def read(path: str) -> list[Image.Image]:
        assert path == "reference_1.mp4"
        return [Image.new("RGB", (96, 64), "red")] * 9

    monkeypatch.setattr(diffusers.utils, "export_to_video", export)
    monkeypatch.setattr(diffusers.utils, "load_video", read)
    exec(code, scope)
    return scope


@pytest.mark.parametrize(
    ("name", "task", "relation"),
    [
        ("cogvideox", "text-to-video", "adapter"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("cogvideox_i2v", "image-to-video", "adapter"),
                ("sana", "text-to-image", "adapter"),
                ("sana_video", "text-to-video", "adapter"),
                ("chroma", "text-to-image", "adapter"),
                ("ernie_image", "text-to-image", "adapter"),
                ("ideogram4", "text-to-image", "adapter"),
                ("anima", "text-to-image", "adapter"),
                ("flux", "text-to-image", "adapter"),
                ("flux_kontext", "image-to-image", "adapter"),
                ("flux2", "text-to-image", "adapter"),
                ("flux2_edit", "image-to-image", "adapter"),
                ("hunyuan_video15", "text-to-video", "adapter"),
                ("krea2", "text-to-image", "adapter"),
                ("qwen_image", "text-to-image", "adapter"),
                ("ltx_video", "text-to-video", "adapter"),
                ("ltx_video_i2v", "image-to-video", "adapter"),
                ("ltx2_ic_lora", "video-to-video", "adapter"),
                ("sd3", "text-to-image", "adapter"),
                ("latte", "text-to-video", "adapter"),
                ("wan", "text-to-video", "adapter"),
                ("wan_flf2v", "image-to-video", "adapter"),
                ("wan_5b_i2v", "image-to-video", "adapter"),
                ("wan_2.2_i2v", "image-to-video", "adapter"),
                ("z_image", "text-to-image", "adapter"),
                ("dit", None, "adapter"),
                ("dit_scratch", None, None),
                ("video_dit_lora", "text-to-video", "adapter"),
                ("video_dit", None, None),
                ("smolvlm2", "video-text-to-text", "adapter"),
                ("videochat2", "video-text-to-text", "adapter"),
            )
        ),
    ],
)
def test_a_run_that_pushes_has_a_card_whose_code_runs_as_pasted(
    hub: FakeHub,
    tiny_checkpoints: dict[str, Path],
    lora_main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    task: str | None,
    relation: str | None,
) -> None:
    args = arguments(name, hub, tiny_checkpoints, tmp_path)
    if name == "cogvideox":  # base weights too, which stock Diffusers loads first
        args.append("optim.groups.connector={lr: 1e-3}")
    lora_main(args)
    assert hub.repos[REPO].private  # by default: nobody has looked at it yet
    card = hub.read(REPO, "README.md").decode()
    assert card_problems(card) == []
    card_metadata = metadata(card)
    assert card_metadata.get("pipeline_tag") == task
    assert card_metadata.get("base_model_relation") == relation
    if name in EDITS:
        assert 'image=[load_image("reference_1.png")],' in card
        assert "--reference reference_1.png" in card
        assert "`reference_1.png` is what the sample is made from, in the order of training" in card
        assert "references of a clip, with their clips: 1 (2)" in card
    if name == EDITED_CLIPS:
        assert "--reference reference_1.mp4" in card
        assert "    reference_downscale_factor=1,\n" in card
        assert "`reference_1.mp4` is what the sample is made from: a clip of 9 frames or more at 8 frames" in card
        adapter = tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors"
        with safe_open(adapter, framework="pt") as adapter_file:
            assert adapter_file.metadata()["reference_downscale_factor"] == "1"
    assert ("reference" in card) == (name in (*EDITS, EDITED_CLIPS))
    scope = paste(card, tmp_path, monkeypatch)
    if "model" in scope:
        return
    pipe = scope["pipe"]
    if "pytorch_lora_weights.safetensors" in hub.repos[REPO].files:
        assert [n for n, _ in pipe.transformer.named_parameters() if ".lora_B." in n]
    if name == "qwen_image":  # whose guidance is no guidance without a negative prompt
        assert "    true_cfg_scale=4.0,\n" in card
        assert "    negative_prompt='',\n" in card
    if name == "cogvideox":
        frames, _, fps = scope["shown"]
        recipe = load_recipe(tmp_path / "run" / "config.yaml")
        assert (len(frames), fps) == (recipe.data.frames, recipe.data.fps)
        assert "load_state_dict(weights, strict=False)" in card


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("sana", "dora", "A DoRA (rank 4, alpha 4) of"),
        ("sana", "lokr", "A LoKr (rank 4, alpha 4) of"),
        ("cogvideox", "loha", "A LoHa (rank 4, alpha 4) of"),
        ("flux2", "oft", "An OFT (blocks of 4) of"),
    ],
)
def test_the_card_loads_every_kind_of_adapter(
    hub: FakeHub,
    tiny_checkpoints: dict[str, Path],
    lora_main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    words: str,
) -> None:
    size = ["lora.rank=null", "lora.alpha=null", "lora.block_size=4"]
    size = size if kind == "oft" else ["lora.rank=4", "lora.alpha=4"]
    lora_main([*arguments(name, hub, tiny_checkpoints, tmp_path), f"lora.kind={kind}", *size])
    card = hub.read(REPO, "README.md").decode()
    assert card_problems(card) == []
    assert words in card
    pipe = paste(card, tmp_path, monkeypatch)["pipe"]
    (file,) = (tmp_path / "run" / "adapter").glob("*.safetensors")
    tensors = load_file(file)
    loaded_parameters = [p for n, p in pipe.transformer.named_parameters() if is_adapter_tensor(n)]
    assert len(loaded_parameters) == len(tensors)
    assert sum(p.double().sum() for p in loaded_parameters).item() == pytest.approx(
        sum(t.double().sum() for t in tensors.values()).item(), rel=1e-4, abs=1e-3
    )


def test_a_run_that_could_not_be_pushed_does_not_start(
    hub: FakeHub,
    tiny_checkpoints: dict[str, Path],
    lora_main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = arguments("cogvideox", hub, tiny_checkpoints, tmp_path)
    hub.accounts = {"hf_canarycanarycanary": Account("me", "read")}
    with pytest.raises(DitLoraError, match=r"hub.push: the token of me can only read.*hf auth login"):
        lora_main(args)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DitLoraError, match=r"hub.push: there is no Hugging Face token"):
        lora_main(args)
    monkeypatch.setenv("HF_TOKEN", "hf_canarycanarycanary")
    hub.accounts = None
    hub.add(REPO, {})
    with pytest.raises(DitLoraError, match=r"hub.push: .*/me/mine already exists and is public"):
        lora_main(args)
    with pytest.raises(DitLoraError, match=r"hub.repo_id: OWNER/NAME on the Hub"):
        lora_main([*args, "hub.repo_id=null"])
    with pytest.raises(DitLoraError, match=r"hub.repo_id: a repository must be OWNER/NAME"):
        lora_main([*args, "hub.repo_id=kitten lora"])
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_push_that_fails_loses_nothing_of_the_run(
    hub: FakeHub,
    tiny_checkpoints: dict[str, Path],
    lora_main: Main,
    tmp_path: Path,
    waits: list[float],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The Hub does not answer at the start, which is a warning, and is down at the end."""
    args = arguments("cogvideox", hub, tiny_checkpoints, tmp_path)
    hub.faults = [Fault("whoami", 503, times=2), Fault("POST .*/commit/", 500, times=1000)]
    with pytest.raises(DitLoraError) as error:
        lora_main([*args, "hub.private=false"])
    run = tmp_path / "run"
    assert error.value.exit_code == 2
    assert str(error.value).startswith(f"the run in {run} is complete, but was not pushed: ")
    assert str(error.value).endswith(f"To continue: dit-lora push {run} {REPO} --public")
    assert "warning: hub.push: the Hub answered 503" in capfd.readouterr().err
    adapter = run / "adapter" / "pytorch_lora_weights.safetensors"
    before = load_file(adapter)
    hub.faults = []
    shutil.rmtree(tmp_path / "data")
    data_of("cogvideox", tmp_path / "data")
    lora_main([*args, "train.resume=auto", "hub.private=false"])
    after = load_file(adapter)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert adapter.read_bytes() == hub.read(REPO, adapter.name)


@pytest.mark.slow
def test_both_of_two_ranks_are_refused_before_they_train(
    launch: Any, tiny_checkpoints: dict[str, Path], tmp_path: Path, shape_clips: Path
) -> None:
    """Only the main process asks the Hub; the other ends with it, not with a time-out."""
    base = tiny_checkpoints["cogvideox-2b"]
    result = launch(
        [
            str(SMOKE / "cogvideox.yaml"),
            f"model.path={base}",
            f"data.path={shape_clips}",
            f"run.dir={tmp_path / 'run'}",
            "hub.push=true",
            f"hub.repo_id={REPO}",
        ],
        ranks=2,
    )
    assert result.returncode == 2
    assert result.stderr.count("error: hub.push: cannot push while HF_HUB_OFFLINE is set") == 1
    assert not (tmp_path / "run").exists()


def test_the_section_is_off_by_default_and_private() -> None:
    values = yaml.safe_load((SMOKE / "cogvideox.yaml").read_text())
    assert "hub" not in values
    hub = load_recipe(SMOKE / "cogvideox.yaml").hub
    assert (hub.push, hub.repo_id, hub.private) == (False, None, True)
