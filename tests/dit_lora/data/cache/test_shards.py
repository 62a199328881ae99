"""Shards: safetensors files that hold several entries, and what is left of them when they are damaged."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dit_lora.data.cache.cache import TensorCache, encode_entry
from dit_lora.data.cache.shards import ShardError, is_in_range, read_header, write_shard
from dit_lora.data.storage import UnreadableError

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (2, 3, 5), (1, 1, 1, 1), (13, 3))


def drawn(seed: int) -> Tensors:
    """Some tensors of odd dtypes and shapes."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    records = {}
    for number in range(draw.randint(1, 4)):
        shape = draw.choice(SHAPES)
        values = torch.randn(shape, generator=generator) * 50
        records[f"t{draw.randint(0, 99)}_{number}"] = values.to(draw.choice(DTYPES))
    return records


def write(folder: Path, entries: dict[str, Tensors]) -> Path:
    facts = {"dtype": "torch.bfloat16", "size": [32, 48]}
    return write_shard(
        folder,
        [
            encode_entry(key, tensors, sample=f"{key}.mp4", facts={**facts, "media": key})
            for key, tensors in entries.items()
        ],
    )


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype is other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


@pytest.mark.parametrize("seed", range(12))
def test_entries_read_back_bit_for_bit_by_us_and_by_safetensors(tmp_path: Path, seed: int) -> None:
    entries = {f"k{number}": drawn(100 * seed + number) for number in range(5)}
    path = write(tmp_path, entries)
    cache = TensorCache(tmp_path)
    for key, tensors in entries.items():
        read_tensors, fault = cache.read(key, {})
        assert fault is None
        assert same(read_tensors, tensors)
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in read_tensors.values())
        assert cache.get_spec(key) == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    flat = {f"{key}/{n}": t for key, tensors in entries.items() for n, t in tensors.items()}
    assert same(load_file(path), flat)


def test_a_header_tells_samples_and_facts_and_holds_what_is_common_once(tmp_path: Path) -> None:
    path = write(tmp_path, {f"k{number}": drawn(number) for number in range(3)})
    entries = read_header(path).entries
    assert [(entry.key, entry.sample) for entry in entries] == [(f"k{k}", f"k{k}.mp4") for k in range(3)]
    assert entries[1].facts == {"dtype": "torch.bfloat16", "size": [32, 48], "media": "k1"}
    with safe_open(path, framework="pt") as file:
        assert json.dumps(file.metadata()).count("bfloat16") == 1


def test_equal_entries_are_an_equal_file(tmp_path: Path) -> None:
    entries = {"a": drawn(1), "b": drawn(2)}
    first_path, second_path = write(tmp_path / "one", entries), write(tmp_path / "other", entries)
    assert first_path.name == second_path.name
    assert first_path.read_bytes() == second_path.read_bytes()
    assert write(tmp_path / "one", {"a": drawn(1), "b": drawn(3)}).name != first_path.name
    assert read_header(first_path).has_valid_name
    assert not read_header(first_path.rename(first_path.with_name("renamed.safetensors"))).has_valid_name


def test_of_a_file_cut_anywhere_the_whole_entries_stay(tmp_path: Path) -> None:
    entries = {f"k{number}": {"x": torch.arange(number + 3.0)} for number in range(4)}
    path = write(tmp_path, entries)
    data, header = path.read_bytes(), read_header(path)
    ends = [entry.end for entry in header.entries]
    assert ends[-1] == len(data)
    edges = {0, 1, 7, 8, 9, 50, header.entries[0].start, *ends}
    for size in sorted({size for edge in edges for size in (edge - 1, edge, edge + 1)}):
        if not 0 <= size <= len(data):
            continue
        path.write_bytes(data[:size])
        cache = TensorCache(tmp_path)
        kept_keys = {f"k{k}" for k, end in enumerate(ends) if end <= size}
        assert {key for key in entries if cache.is_complete(key)} == kept_keys
        assert len(cache) == len(kept_keys)
        for key in entries:
            spec = {"x": (torch.Size([2]), torch.float32)}
            read_tensors, fault = cache.read(key, spec)
            assert (fault is None) == (key in kept_keys)
            if fault:
                assert read_tensors["x"].isnan().all()
                assert "cannot be read" in fault


def test_no_flipped_bit_of_a_header_or_of_values_gives_a_wrong_value(tmp_path: Path) -> None:
    entries = {f"k{number}": drawn(number) | {"x": torch.ones(3)} for number in range(3)}
    path = write(tmp_path, entries)
    data = path.read_bytes()
    draw, num_faults = random.Random(0), 0
    for offset in [*range(0, 8), *(draw.randrange(8, len(data)) for _ in range(400))]:
        damaged_data = bytearray(data)
        damaged_data[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged_data)
        cache = TensorCache(tmp_path)
        for key, tensors in entries.items():
            try:
                read_tensors, fault = cache.read(key, {})
            except UnreadableError:  # the bit was one of the key: no entry of this name is there
                num_faults += 1
                continue
            assert fault or same(read_tensors, tensors), offset
            num_faults += fault is not None
    assert num_faults > 100


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"__metadata__": 3}',
        b'{"__metadata__": {"facts": "{}"}, "k/x": {"dtype": "F32", "shape": [1]}}',
        b'{"__metadata__": {"facts": "{}", "k": ""}, "k/x": 3}',
        b'{"__metadata__": {"facts": "{}", "k": "00 []"}, '
        b'"k/x": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}',
        b'{"__metadata__": {"facts": "{}", "k": "00 []"}, '
        b'"k/x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"facts": "{}", "k": "00 []"}, '
        b'"k/x": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
    ],
)
def test_a_nonsense_header_is_no_exception_and_hides_no_other_shard(tmp_path: Path, header: bytes) -> None:
    write(tmp_path, {"good": drawn(0)})
    (tmp_path / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    cache = TensorCache(tmp_path)
    assert len(cache) == 1
    assert cache.read("good", {})[1] is None
    assert not cache.is_complete("k")
    try:
        assert read_header(tmp_path / "bad.safetensors").entries == []
    except ShardError as error:
        assert "bad.safetensors" in str(error)  # noqa: PT017


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_the_range_is_that_of_the_values_to_the_last_bit(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        assert is_in_range(torch.tensor([2**40]), 1e4)
        return
    for limit in (1e4, 9999.99, 0.1, 1e38):
        bits = torch.tensor(np.arange(2**16, dtype=np.uint16)).view(torch.float16).float()
        edge = torch.tensor(limit).to(dtype)
        edge_neighbours = torch.stack([edge.nextafter(edge * 0), edge, edge.nextafter(edge * torch.inf)])
        for value in [*bits[::257].to(dtype), *edge_neighbours, *-edge_neighbours]:
            expected = bool(value.double().abs() <= limit)
            assert is_in_range(value, limit) == expected, (value, limit)
            assert is_in_range(torch.stack([value * 0, value]), limit) == expected
    assert is_in_range(torch.empty(0, dtype=dtype), 1.0)
    assert not is_in_range(torch.full((3, 2), torch.nan, dtype=dtype).T, 1e4)
