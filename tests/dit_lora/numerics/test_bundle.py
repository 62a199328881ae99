"""A bundle comes back bit for bit, or says in one line why not, and tells nothing of the machine that wrote it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_lora.errors import DitLoraError
from dit_lora.numerics.bundle import FORMAT, read_bundle, scrubbed, write_bundle

Tensors = dict[str, torch.Tensor]
FACTS: Mapping[str, Any] = {
    "event": {"step": 12, "kind": "non_finite_loss", "verdict": {"cause": "data"}},
    "replay": {"step": 12, "micro_step": 1, "rank": 0, "ids": ["a.mp4", "b.mp4"], "draws": [8, 21]},
    "loss": 0.1,
}


@pytest.fixture
def samples() -> Tensors:
    """Two rows of every dtype a cache holds, with the values that tripped the step."""
    draws = torch.Generator().manual_seed(31)
    latents = torch.randn(2, 3, 5, generator=draws).bfloat16()
    latents[1, 2, 4], latents[0, 0, 0] = torch.nan, -torch.inf
    embeds = torch.randn(2, 7, generator=draws).half()
    embeds.view(torch.int16)[1, 3] = 0x7D5A  # a NaN with a payload of its own
    strided = torch.randn(5, 2, generator=draws).t()
    assert not strided.is_contiguous()
    return {
        "latents": latents,
        "prompt_embeds": embeds,
        "strided": strided,
        "labels": torch.tensor([[3, -100], [2**40, 0]]),
        "nothing": torch.empty(2, 0),
        "scale": torch.tensor(0.7),
    }


@pytest.fixture
def weights() -> Tensors:
    draws = torch.Generator().manual_seed(32)
    return {
        "block.0.lora_A.default.weight": torch.nn.Parameter(torch.randn(4, 6, generator=draws)),
        "block.0.lora_B.default.weight": torch.randn(6, 4, generator=draws).bfloat16(),
    }


def assert_same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        pair = [
            one.detach().contiguous().reshape(-1).view(torch.uint8)
            for one in (tensor, theirs[name])
        ]
        assert torch.equal(*pair), name


def test_a_bundle_comes_back_bit_for_bit(
    tmp_path: Path, samples: Tensors, weights: Tensors
) -> None:
    folder = tmp_path / "bundles" / "step-12"
    assert write_bundle(folder, FACTS, samples, weights, limit_mib=1) == []
    bundle = read_bundle(folder)
    assert_same_bits(bundle.samples, samples)
    assert_same_bits(bundle.weights, weights)
    assert bundle.facts == {**FACTS, "format": FORMAT, "left_out": []}
    assert not any(weight.requires_grad for weight in bundle.weights.values())
    assert not list(folder.glob(".*"))


def test_a_bundle_without_trained_weights_comes_back(tmp_path: Path, samples: Tensors) -> None:
    write_bundle(tmp_path, FACTS, samples, {}, limit_mib=1)
    assert read_bundle(tmp_path).weights == {}


def mib(*tensors: Tensors) -> float:
    return sum(tensor.nbytes for one in tensors for tensor in one.values()) / 2**20


@pytest.mark.parametrize(
    ("room", "lacks"),
    [
        (lambda samples, weights: mib(samples, weights), []),
        (lambda samples, weights: mib(samples, weights) - 1e-6, ["trained"]),
        (lambda samples, weights: mib(samples), ["trained"]),
        (lambda samples, weights: mib(samples) - 1e-6, ["samples"]),
        (lambda samples, weights: 1e-6, ["samples", "trained"]),
    ],
    ids=["all fit", "a byte short", "no room for weights", "no room for samples", "no room"],
)
def test_what_does_not_fit_is_left_out_whole_and_said(
    tmp_path: Path,
    samples: Tensors,
    weights: Tensors,
    room: Callable[[Tensors, Tensors], float],
    lacks: list[str],
) -> None:
    """The weights are smaller than the samples here, so that they fit where those do not."""
    samples["latents"] = torch.randn(2, 64)
    assert mib(samples) > mib(weights)
    left_out = write_bundle(tmp_path, FACTS, samples, weights, limit_mib=room(samples, weights))
    assert [words.partition(".")[0] for words in left_out] == lacks
    assert all("beyond guard.bundle_mib" in words for words in left_out)
    assert json.loads((tmp_path / "bundle.json").read_text())["left_out"] == left_out
    written = {path.stem for path in tmp_path.glob("*.safetensors")}
    assert written == {"samples", "trained"} - {*lacks}
    if lacks:
        with pytest.raises(DitLoraError) as error:
            read_bundle(tmp_path)
        assert str(error.value) == f"{tmp_path} cannot be replayed: it lacks {'; '.join(left_out)}"
    else:
        assert_same_bits(read_bundle(tmp_path).weights, weights)


def cut(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])

    return do


def facts(text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "bundle.json").write_bytes(data) and None


TORN: dict[str, Callable[[Path], object]] = {
    **{
        f"no {name}": lambda folder, name=name: (folder / name).unlink()
        for name in ("bundle.json", "samples.safetensors", "trained.safetensors")
    },
    **{
        f"torn {name}": cut(name)
        for name in ("bundle.json", "samples.safetensors", "trained.safetensors")
    },
    "empty samples": lambda folder: (folder / "samples.safetensors").write_bytes(b""),
    "no facts": facts(""),
    "no format": facts('{"left_out": []}'),
    "no list of what is left out": facts(f'{{"format": {FORMAT}}}'),
    "a list": facts("[1, 2]"),
    "a number": facts("3"),
    "no UTF-8": facts(b"\xff\xfe{}"),
}


@pytest.mark.parametrize("how", TORN)
def test_a_torn_bundle_is_one_line_of_error(
    tmp_path: Path, samples: Tensors, weights: Tensors, how: str
) -> None:
    write_bundle(tmp_path, FACTS, samples, weights, limit_mib=1)
    TORN[how](tmp_path)
    with pytest.raises(DitLoraError) as error:
        read_bundle(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} is not a whole bundle: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", [FORMAT + 1, 0, "1", None])
def test_another_format_is_refused_by_its_number(
    tmp_path: Path, samples: Tensors, weights: Tensors, version: object
) -> None:
    write_bundle(tmp_path, FACTS, samples, weights, limit_mib=1)
    path = tmp_path / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(DitLoraError) as error:
        read_bundle(tmp_path)
    assert str(error.value) == f"{tmp_path} has format {version}; this version reads {FORMAT}"


def test_a_folder_that_is_not_there_is_one_line_of_error(tmp_path: Path) -> None:
    with pytest.raises(
        DitLoraError, match=r"is not a whole bundle: no .*bundle\.json; give a folder"
    ):
        read_bundle(tmp_path / "none")


PRIVATE: list[tuple[str, str]] = [
    ("/home/erika/clips/cat.mp4", "cat.mp4"),
    ("~/clips/cat.mp4", "cat.mp4"),
    ("/mnt/erika", "erika"),
    (r"C:\Users\erika\clips\cat.mp4", "cat.mp4"),
    (r"d:\erika\cat.mp4 reaches 1e+30", "cat.mp4 reaches 1e+30"),
    ("C:/Users/erika/cat.mp4", "cat.mp4"),
    ("cannot read '/home/erika/a/cat.mp4': 2 of 3", "cannot read 'cat.mp4': 2 of 3"),
    ("(/home/erika/cat.mp4), /home/erika/dog.mp4; x", "(cat.mp4), dog.mp4; x"),
    ("path=/home/erika/cat.mp4", "path=cat.mp4"),
    ("file:///home/erika/cat.mp4", "file:cat.mp4"),
    ("/home/erika/hf_AbCdEfGhIjKl", "[token]"),
    ("Bearer hf_AbCdEfGhIjKlMnOp.", "Bearer [token]."),
    ("HF_TOKEN=hf_AbCdEfGhIjKlMnOp", "HF_TOKEN=[token]"),
    ("ghp_0123456789abcdef and sk-proj-0123456789", "[token] and [token]"),
    ("github_pat_0123456789_abcdef, gho_0123456789", "[token], [token]"),
    ("WANDB_API_KEY=" + "0123456789abcdef0123" * 2, "WANDB_API_KEY=[token]"),
    ("wandb_v1_0123456789", "[token]"),
]


@pytest.mark.parametrize(("text", "public"), PRIVATE)
def test_paths_are_cut_to_their_last_part_and_tokens_blanked(text: str, public: str) -> None:
    assert scrubbed(text) == public
    nested = scrubbed({"a": [text, (text, 3)], "b": {"c": {"d": text}}, "e": None, "f": 0.5})
    assert nested == {
        "a": [public, [public, 3]],
        "b": {"c": {"d": public}},
        "e": None,
        "f": 0.5,
    }


@pytest.mark.parametrize(
    "text",
    [
        "clips/cat.mp4",
        "../clips/cat.mp4",
        "./cat.mp4",
        "THUDM/CogVideoX-5b",
        "first inf in the forward: aten.addmm.default at blocks.3.ff",
        "2.7e+04, 2.43 times below the limit",
        "hf_ tokens",
        "0123456789abcdef" * 4,
        "NaN in 3 / 4 of them",
        "",
    ],
)
def test_relative_names_and_numbers_stay_as_they_are(text: str) -> None:
    assert scrubbed(text) == text


def test_no_byte_of_the_folder_tells_of_the_machine(
    tmp_path: Path, samples: Tensors, weights: Tensors
) -> None:
    told = {f"note {i}": {"words": [text]} for i, (text, _) in enumerate(PRIVATE)}
    home = {"cwd": str(Path.cwd()), "home": str(Path.home() / ".cache" / "x"), "tmp": str(tmp_path)}
    folder = tmp_path / "bundle"
    write_bundle(folder, {**FACTS, **told, **home}, samples, weights, limit_mib=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["bundle.json", "samples.safetensors", "trained.safetensors"]
    data = b"".join(path.read_bytes() for path in folder.iterdir()).lower()
    private = [b"/home", b"users", b"/mnt", b"~", b":\\", b"hf_a", b"ghp_", b"sk-proj"]
    private += [
        str(path.parent).lower().encode() for path in (tmp_path, Path.cwd()) if path.parent.name
    ]
    assert [word for word in private if word in data] == []


@pytest.mark.parametrize(
    "value",
    [
        "/home/Erika Mann/clips/cat.mp4",
        r"C:\Users\Erika Mann\cat.mp4",
        r"\\fileserver\erika\cat.mp4",
        "~erika/clips/cat.mp4",
        {"/home/erika/cat.mp4": "has 1 NaN"},
    ],
    ids=["space", "Windows and space", "UNC", "another's home", "key"],
)
def test_no_other_form_of_a_path_tells_a_name(value: object) -> None:
    assert "erika" not in json.dumps(scrubbed(value)).lower()
