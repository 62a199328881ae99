"""Files that cannot be read end in one line, and headers are read without the tensors."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dit_lora.environment.safetensors_files import (
    TensorHeader,
    UnreadableFileError,
    open_safetensors,
    read_header,
    read_metadata,
    read_tensors,
    write_tensors,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16()}, path, metadata={"rank": "4"})
    return path


def test_the_header_names_dtypes_and_shapes(file: Path) -> None:
    header = read_header(file)
    assert header.metadata == read_metadata(file) == {"rank": "4"}
    assert header.tensors == {"a": TensorHeader("F32", (2, 3)), "b": TensorHeader("BF16", (4,))}


def test_values_are_read_while_models_are_built_on_meta(file: Path) -> None:
    with torch.device("meta"):
        tensors = read_tensors(file)
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].dtype is torch.bfloat16


def test_a_missing_file_has_no_tensors_only_if_it_may_be_missing(tmp_path: Path) -> None:
    assert read_tensors(tmp_path / "none", missing_ok=True) == {}
    with pytest.raises(UnreadableFileError, match=r"^cannot read \S+none: No such file or directory$"):
        read_tensors(tmp_path / "none")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("read", [read_header, read_metadata, read_tensors])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is incomplete or not a safetensors file; copy"),
        (lambda path: path.write_text("nonsense"), "it is incomplete or not a safetensors file"),
        (make_pipe, "is not a regular file"),
    ],
    ids=["torn", "text", "pipe"],
)
def test_an_unreadable_file_is_named_in_one_line(
    file: Path, damage: Callable[[Path], object], reason: str, read: Callable[[Path], object]
) -> None:
    damage(file)
    with pytest.raises(UnreadableFileError, match=rf"^cannot read \S+x\.safetensors: .*{reason}") as raised:
        read(file)
    assert "\n" not in str(raised.value)


def test_reading_an_absent_tensor_names_the_file(file: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"cannot read \S+x\.safetensors"), open_safetensors(file) as opened:
        opened.get_tensor("c")


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.zeros(2, 2, dtype=torch.bfloat16)}
    metadata = {f"key {number}": 'a "cat"\n\u0001é\x7f\U0001f600' for number in range(9)}
    written = set()
    for _ in range(4):
        write_tensors(tensors, tmp_path / "a.safetensors", metadata)
        written.add((tmp_path / "a.safetensors").read_bytes())
    assert len(written) == 1
    assert read_metadata(tmp_path / "a.safetensors") == metadata
    read = read_tensors(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    write_tensors(tensors, tmp_path / "b.safetensors")
    assert read_metadata(tmp_path / "b.safetensors") == {}
