"""A bundle comes back bit for bit, or says in one line why not, and tells nothing of the machine that wrote it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from seeded_secrets import PATHS, REVISION, TOKENS, found_in

from dit_lora.errors import DitLoraError
from dit_lora.guard.repro_bundle import FORMAT, read_replay_bundle, write_replay_bundle

Tensors = dict[str, torch.Tensor]
FACTS: Mapping[str, Any] = {
    "event": {"step": 12, "kind": "non_finite_loss", "verdict": {"cause": "data"}},
    "replay": {"step": 12, "micro_step": 1, "rank": 0, "ids": ["a.mp4", "b.mp4"], "draws": [8, 21]},
    "packages": {"torch": "2.13"},
    "switched_off": [],
    "start_peak": 1.5,
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
        pair = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (tensor, theirs[name])]
        assert torch.equal(*pair), name


def test_a_bundle_comes_back_bit_for_bit(tmp_path: Path, samples: Tensors, weights: Tensors) -> None:
    folder = tmp_path / "bundles" / "step-12"
    assert write_replay_bundle(folder, FACTS, samples, weights, limit_mib=1) == []
    bundle = read_replay_bundle(folder)
    assert_same_bits(bundle.samples, samples)
    assert_same_bits(bundle.weights, weights)
    assert bundle.facts == {**FACTS, "format": FORMAT, "left_out": []}
    assert not any(weight.requires_grad for weight in bundle.weights.values())
    assert not list(folder.glob(".*"))


def test_a_bundle_without_trained_weights_comes_back(tmp_path: Path, samples: Tensors) -> None:
    write_replay_bundle(tmp_path, FACTS, samples, {}, limit_mib=1)
    assert read_replay_bundle(tmp_path).weights == {}


def mib(*tensors: Tensors) -> float:
    return sum(tensor.nbytes for group in tensors for tensor in group.values()) / 2**20


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
    left_out = write_replay_bundle(tmp_path, FACTS, samples, weights, limit_mib=room(samples, weights))
    assert [message.partition(".")[0] for message in left_out] == lacks
    assert all("more than guard.bundle_mib" in message for message in left_out)
    assert json.loads((tmp_path / "bundle.json").read_text())["left_out"] == left_out
    stems = {path.stem for path in tmp_path.glob("*.safetensors")}
    assert stems == {"samples", "trained"} - {*lacks}
    if lacks:
        with pytest.raises(DitLoraError) as error:
            read_replay_bundle(tmp_path)
        assert str(error.value) == f"{tmp_path} cannot be replayed: it lacks {'; '.join(left_out)}"
    else:
        assert_same_bits(read_replay_bundle(tmp_path).weights, weights)


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
    **{f"torn {name}": cut(name) for name in ("bundle.json", "samples.safetensors", "trained.safetensors")},
    "empty samples": lambda folder: (folder / "samples.safetensors").write_bytes(b""),
    "no facts": facts(""),
    "no format": facts('{"left_out": []}'),
    "no list of what is left out": facts(f'{{"format": {FORMAT}}}'),
    "a list": facts("[1, 2]"),
    "a number": facts("3"),
    "no UTF-8": facts(b"\xff\xfe{}"),
}


@pytest.mark.parametrize("how", TORN)
def test_a_torn_bundle_is_one_line_of_error(tmp_path: Path, samples: Tensors, weights: Tensors, how: str) -> None:
    write_replay_bundle(tmp_path, FACTS, samples, weights, limit_mib=1)
    TORN[how](tmp_path)
    with pytest.raises(DitLoraError) as error:
        read_replay_bundle(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} is not a complete bundle: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", [FORMAT + 1, 0, "1", None])
def test_another_format_is_refused_by_its_number(
    tmp_path: Path, samples: Tensors, weights: Tensors, version: object
) -> None:
    write_replay_bundle(tmp_path, FACTS, samples, weights, limit_mib=1)
    path = tmp_path / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(DitLoraError) as error:
        read_replay_bundle(tmp_path)
    assert str(error.value) == f"{tmp_path} has format {version}; this version reads {FORMAT}"


def test_a_folder_that_is_not_there_is_one_line_of_error(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"is not a complete bundle: it has no .*bundle\.json; give a folder"):
        read_replay_bundle(tmp_path / "none")


def test_no_byte_of_the_folder_tells_of_the_machine(tmp_path: Path, samples: Tensors, weights: Tensors) -> None:
    private = {**TOKENS, **PATHS}
    messages_by_text = {text: {"words": [text, f"cannot read {text}: 2 of 3"]} for text in private.values()}
    home = {"cwd": str(Path.cwd()), "home": str(Path.home() / ".cache" / "x"), "tmp": str(tmp_path)}
    folder = tmp_path / "bundle"
    write_replay_bundle(folder, {**FACTS, **messages_by_text, **home}, samples, weights, limit_mib=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["bundle.json", "samples.safetensors", "trained.safetensors"]
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    assert found_in(data) == []
    parents = [str(path.parent).encode() for path in (tmp_path, Path.cwd()) if path.parent.name]
    assert [word for word in (b"/home", b"/mnt", *parents) if word in data] == []


def test_a_pinned_revision_is_in_the_bundle(tmp_path: Path, samples: Tensors, weights: Tensors) -> None:
    pinned = {"recipe": {"model": {"path": "THUDM/CogVideoX-5b", "revision": REVISION}}}
    write_replay_bundle(tmp_path / "bundle", {**FACTS, **pinned}, samples, weights, limit_mib=1)
    assert read_replay_bundle(tmp_path / "bundle").facts["recipe"] == pinned["recipe"]
