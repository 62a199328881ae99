"""The model card: metadata that the Hub accepts, and captions that cannot act as markup."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from card_rules import card_problems, metadata
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.hub.card import write_card
from dit_lora.hub.contents import CardSample, PublishedContents, collect_contents
from dit_lora.hub.markdown import escape_markdown
from dit_lora.training.tasks.facts import find_common_prefix

REPO = "me/kitten-lora"
ODD = (
    'a "red" disc\'s path: 50% | done',
    "# not a title\n---\nlicense: mit\n",
    "**bold** `code` <script>alert(1)</script> [a](http://b) ![c](d) ~~e~~ $f$ _g_ &amp; \\",
    "``` \n```python\nimport os\n```",
    "un chat \N{CAT FACE} \N{ZERO WIDTH JOINER} 猫 \u2028 next \x85 {{ jinja }} {% raw %}",
    "- item",
)


@pytest.fixture
def contents(trained: Path) -> PublishedContents:
    return collect_contents(trained)


def changed(
    contents: PublishedContents,
    made: Mapping[str, Any] | None = None,
    pipeline: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> PublishedContents:
    facts = dict(contents.facts)
    facts["pipeline"] = {**facts["pipeline"], **(pipeline or {})}
    facts["data"] = {**facts["data"], **(data or {})}
    return replace(contents, metadata={**contents.metadata, **(made or {})}, facts=facts)


def test_a_known_base_is_named_with_its_licence(contents: PublishedContents) -> None:
    card = write_card(changed(contents, {"base_model": "THUDM/CogVideoX-5b"}), REPO)
    assert card_problems(card) == []
    card_metadata = metadata(card)
    assert (card_metadata["base_model"], card_metadata["base_model_relation"]) == (
        "THUDM/CogVideoX-5b",
        "adapter",
    )
    assert (card_metadata["library_name"], card_metadata["pipeline_tag"]) == (
        "diffusers",
        "text-to-video",
    )
    assert (card_metadata["license"], card_metadata["license_name"]) == (
        "other",
        "cogvideox-license",
    )
    assert card_metadata["license_link"].endswith("/THUDM/CogVideoX-5b/blob/main/LICENSE")
    assert {"dit-lora", "cogvideox", "lora"} <= set(card_metadata["tags"])
    assert 'from_pretrained("THUDM/CogVideoX-5b", dtype=torch.float32)' in card
    assert ModelCard(card).data.base_model == "THUDM/CogVideoX-5b"


@pytest.mark.parametrize(
    ("family", "base", "license", "name"),
    [
        ("cogvideox", "THUDM/CogVideoX-2b", "apache-2.0", None),
        ("cogvideox", "zai-org/CogVideoX1.5-5B-I2V", "other", "cogvideox-license"),
        ("sana", "Efficient-Large-Model/Sana_1600M_1024px_diffusers", "other", "nscl-v2-custom"),
        ("sana", "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers", "other", "nscl-v2-custom"),
        (
            "sana_video",
            "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
            "other",
            "nvidia-open-model-license",
        ),
        ("flux2", "black-forest-labs/FLUX.2-klein-4B", "apache-2.0", None),
        ("flux2", "black-forest-labs/FLUX.2-klein-9B", "other", "flux-non-commercial-license"),
        ("chroma", "lodestones/Chroma1-HD", "apache-2.0", None),
        ("ernie_image", "baidu/ERNIE-Image", "apache-2.0", None),
        (
            "ideogram4",
            "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers",
            "other",
            "ideogram-4-non-commercial",
        ),
        (
            "hunyuan_video15",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            "other",
            "tencent-hunyuan-community",
        ),
        ("anima", "circlestone-labs/Anima-Base-v1.0-Diffusers", "other", "circlestone-labs-non-commercial-license"),
        ("kandinsky5", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", "mit", None),
        ("krea2", "krea/Krea-2-Raw", "other", "krea-2-community-license"),
        ("qwen_image21", "Qwen/Qwen-Image-2.1-Turbo", "other", "qwen-research"),
        ("sd3", "stabilityai/stable-diffusion-3.5-large", "other", "stabilityai-ai-community"),
        ("dit", "facebook/DiT-XL-2-256", "cc-by-nc-4.0", None),
        ("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "apache-2.0", None),
        ("wan", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "apache-2.0", None),
        ("z_image", "Tongyi-MAI/Z-Image-Turbo", "apache-2.0", None),
        ("chat", "llava-hf/LLaVA-NeXT-Video-7B-hf", "llama2", None),
        ("chat", "Qwen/Qwen2.5-VL-3B-Instruct", "other", "qwen-research"),
        ("cogvideox", "somebody/CogVideoX-5b", None, None),
        ("cogvideox", None, None, None),
    ],
)
def test_licences_are_the_bases_own(family: str, base: str | None, license: str | None, name: str | None) -> None:
    licence = get_family(family).get_license(base)
    assert (licence.id if licence else None, licence.name if licence else None) == (license, name)
    if licence and licence.id == "other":
        assert licence.link is not None


def test_an_unknown_base_has_no_licence_and_a_folder_is_no_base(contents: PublishedContents) -> None:
    card = write_card(changed(contents, {"base_model": "somebody/theirs"}), REPO)
    assert "license" not in metadata(card)
    assert "Not stated: see the licence of the base model" in card
    card = write_card(contents, REPO)  # trained on a folder
    card_metadata = metadata(card)
    assert not {"base_model", "base_model_relation", "license"} & set(card_metadata)
    assert "(a local folder)" in card
    assert 'from_pretrained("path/to/base"' in card


def test_the_gallery_shows_before_and_after(contents: PublishedContents) -> None:
    card = write_card(contents, REPO)
    assert metadata(card)["widget"] == [
        {"text": "a blue disc moves", "output": {"url": "samples/after_00.mp4"}},
        {"text": "before training: a blue disc moves", "output": {"url": "samples/before_00.mp4"}},
    ]
    assert "<Gallery />" in card
    assert "| [before](samples/before_00.mp4) | [after](samples/after_00.mp4) |" in card


@pytest.mark.parametrize("caption", ODD)
def test_odd_captions_are_shown_as_they_are_and_are_no_markup(contents: PublishedContents, caption: str) -> None:
    samples = (CardSample(caption, "samples/before_00.png", "samples/after_00.png"),)
    odd_contents = replace(changed(contents, data={"caption_prefix": caption}), card_samples=samples)
    card = write_card(odd_contents, REPO)
    assert card_problems(card) == []
    card_metadata = metadata(card)
    assert card_metadata["widget"][0]["text"] == caption
    assert card_metadata["instance_prompt"] == caption
    assert ModelCard(card).data.widget[0]["text"] == caption
    (code,) = re.findall(r"```python\n(.*?)\n```", card, flags=re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.keyword)]
    assert [node.value.value for node in calls if node.arg == "prompt"] == [caption]  # type: ignore[attr-defined]
    body = card.split("\n---\n", 1)[1].split("## Use")[0]
    html = MarkdownIt("gfm-like", {"linkify": False}).render(body)
    collapsed_caption = " ".join(caption.split())
    assert f"<td>{escaped(collapsed_caption)}</td>" in html
    assert "<script>" not in html
    assert "Training data" in MarkdownIt().render(card)  # no fence is left open


def escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text


def test_what_has_no_task_on_the_hub_gets_none(contents: PublishedContents) -> None:
    by_class = changed(contents, pipeline={"condition": "class_labels", "label": [3]})
    card = write_card(by_class, REPO)
    assert card_problems(card) == []
    card_metadata = metadata(card)
    assert not {"pipeline_tag", "model-index"} & set(card_metadata)
    assert "class-conditional" in card_metadata["tags"]
    assert "class_labels=[3]," in card


def test_the_eval_loss_is_a_result_with_what_it_was_measured_on(contents: PublishedContents) -> None:
    (model,) = metadata(write_card(contents, REPO))["model-index"]
    (result,) = model["results"]
    assert model["name"] == "kitten-lora"
    assert result["task"] == {"type": "text-to-video"}
    assert "noise that training does not use" in result["dataset"]["name"]
    (metric,) = result["metrics"]
    assert metric["value"] == pytest.approx(contents.run.eval_losses[2], abs=1e-6)


def test_the_loss_of_held_out_samples_is_the_result_if_there_is_one(contents: PublishedContents) -> None:
    validated = replace(contents, run=replace(contents.run, validation_losses={0: 0.5, 2: 0.25}))
    card = write_card(validated, REPO)
    (result,) = metadata(card)["model-index"][0]["results"]
    assert result["dataset"]["name"] == "samples that are never trained on"
    assert result["metrics"] == [{"type": "loss", "value": 0.25, "name": "validation loss"}]
    assert "eval loss (training samples with noise" in card
    assert "validation loss (samples that are never trained on): 0.5000 before, 0.2500 after (-50.0 %)" in card


def test_data_and_events_are_told_by_counts(contents: PublishedContents) -> None:
    event = {
        "step": 1,
        "kind": "non_finite_loss",
        "sample_ids": ["alice_01.mp4"],
        "verdict": {"cause": "data", "words": "alice_01.mp4 is bad"},
        "action": "quarantine",
    }
    run = replace(contents.run, events=[event, event], quarantine=[{"sample_id": "alice_01.mp4"}])
    card = write_card(replace(contents, run=run), REPO)
    assert "alice" not in card
    assert "- guard: non-finite loss, cause data: 2 times; action: quarantine" in card
    assert "- 1 of the samples left out by the guard" in card
    assert "- guard: no step failed" in write_card(contents, REPO)
    assert "- 5 clips" in card
    assert "- seconds of a clip: 1.12; 5.6 in all" in card
    assert "- frames x height x width, with their samples: 9x32x48 (5)" in card
    assert "- words of a caption: 11; 5 captions are distinct" in card
    assert "| rank, alpha, dropout | 4, 8, 0 |" in card
    assert "| scale | passed |" in card


def test_the_published_recipe_is_the_runs_own(contents: PublishedContents, tmp_path: Path) -> None:
    """Chat's and sources' places too are placeholders, and the words of the recipe stay."""
    from dit_lora.hub.cleaning import redact_recipe

    config = {**contents.run.config, "hub": {"push": True, "repo_id": "me/x", "private": True}}
    config["data"] = {
        **config["data"],
        "path": None,
        "cache": "alice/cache",
        "sources": [
            {"path": "/home/alice/a"},
            {"path": "acme/clips", "caption": "/imagine/art a cat"},
        ],
    }
    config["validation"] = {
        **config["validation"],
        "prompts": ["/imagine/art a cat", "b"],
        "images": ["/home/alice/1.png", "alice/2.jpg"],
    }
    config["guard"] = {**config["guard"], "quarantine": "~/alice/quarantine.jsonl"}
    config["train"] = {**config["train"], "resume": "/home/alice/run/checkpoints/step_000001"}
    text = redact_recipe(config, "acme/base", ["acme/clips"])
    assert "alice" not in text
    (tmp_path / "config.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "config.yaml")
    assert [source.path for source in recipe.data.sources] == ["path/to/data_1", "acme/clips"]
    assert recipe.data.sources[1].caption == "/imagine/art a cat"
    assert recipe.validation.prompts == ("/imagine/art a cat", "b")
    assert recipe.validation.images == ("path/to/images_00.png", "path/to/images_01.jpg")
    assert (recipe.train.resume, recipe.hub.push, recipe.data.cache) == ("none", False, None)


@pytest.mark.parametrize(
    ("captions", "prefix"),
    [
        (["sks dog runs", "sks dog sleeps"], "sks dog"),
        (["a video of TOK in snow", "a video of TOK at sea"], "a video of TOK"),
        (["a red disc", "a green disc"], None),
        (["a video of a cat", "a video of a dog"], None),
        (["a cat", "a cat"], "a cat"),
        (["BW_STYLE A cat", "BW_STYLE A dog"], "BW_STYLE"),
        (["one caption"], None),
        ([], None),
        (["", "x"], None),
    ],
)
def test_a_trigger_is_what_all_captions_begin_with(captions: list[str], prefix: str | None) -> None:
    assert find_common_prefix(captions) == prefix


def test_plain_text_is_on_one_line_and_has_no_token() -> None:
    assert escape_markdown("a\n|b hf_abcdefghijkl") == r"a \|b \[token\]"


def test_what_it_started_from_and_was_shown_on_is_told(contents: PublishedContents) -> None:
    adapters_under = {"scale": 0.5, "sha256": "0" * 64}
    run_metadata = {
        "continued": {"name": "me/start_1", "sha256": "1" * 64},
        "under": [
            {"name": "back", "in_samples": False, **adapters_under},
            {"name": "look", "in_samples": True, **adapters_under},
        ],
        "samples_from": "me/turbo",
    }
    card = write_card(changed(contents, run_metadata), REPO)
    assert card_problems(card) == []
    assert "Training continued from the LoRA me/start\\_1." in card
    assert "the frozen adapter back, scale 0.5; it is not needed to use this one." in card
    assert "the frozen adapter look, scale 0.5; load it together with this one." in card
    assert "The samples were made with this adapter in me/turbo, not in its base." in card
    assert "continued" not in write_card(contents, REPO)


def _keys(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        yield (*above, key)
        if isinstance(inner, dict):
            yield from _keys(inner, (*above, key))


CHANGES = ("missing", "null", "list")


RECORDS = ("facts.json", "verification.json", "environment.json", "config.yaml")


@pytest.mark.parametrize(
    ("name", "num_changes", "every"),
    [
        *((name, 1, 1) for name in RECORDS[:3]),
        ("config.yaml", 1, 4),
        pytest.param("config.yaml", 1, 1, marks=pytest.mark.thorough),
        *(pytest.param(name, 3, 1, marks=pytest.mark.thorough) for name in RECORDS[:3]),
    ],
)
def test_a_card_without_any_of_its_facts_is_written_or_refused_in_one_line(
    run_dir: Path, name: str, num_changes: int, every: int
) -> None:
    file = run_dir / name
    original = yaml.safe_load(file.read_text())
    refusals = []
    for number, path in enumerate(list(_keys(original))[::every]):
        # Each key is changed in one way, next to one that is in another, or in every way.
        for change in (CHANGES * 2)[number % 3 : number % 3 + num_changes]:
            record = json.loads(json.dumps(original))
            section = record
            for key in path[:-1]:
                section = section[key]
            if change == "missing":
                del section[path[-1]]
            else:
                section[path[-1]] = None if change == "null" else [[1]]
            file.write_text(json.dumps(record))
            try:
                card = write_card(collect_contents(run_dir), REPO)
            except DitLoraError as error:
                refusals.append(str(error))
            else:
                assert card_problems(card) == []
    assert len(refusals) > (5 if every == 1 else 3)
    assert all(name in text and "\n" not in text for text in refusals)
