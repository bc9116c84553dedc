"""Are these the weights of that directory? A look at some rows of every tensor.

Not proof: identity is the digest of all bytes. It catches what a digest of files cannot see, a
model that was trained, merged or patched in memory after it was loaded: that touches nearly every
row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MAX_HEADER_BYTES = 100 << 20
"""The bound of the safetensors format itself."""

_MAX_ROW_BYTES = 64 * 1024


class _Stored(NamedTuple):
    """A tensor in a file: where, and as what."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def differing_tensor(state: Mapping[str, torch.Tensor], directory: Path) -> str | None:
    """The name of a tensor that differs from the one stored under its name; None if none was found.

    Reads the files that Transformers would load. Tensors that it renames or builds from several are
    passed over, and so are other formats than safetensors and files that cannot be read: the digest
    names those.

    Args:
        state: the model's tensors by name.
        directory: where they were loaded from.
    """
    for path in _files(directory):
        try:
            with path.open("rb") as file:
                for stored in _tensors(file.fileno()):
                    tensor = state.get(stored.name)
                    if tensor is not None and _differs(tensor, stored, file.fileno()):
                        return stored.name
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return None


def _files(directory: Path) -> list[Path]:
    """In the order of Transformers: one whole file, else what the index names."""
    whole = directory / "model.safetensors"
    if whole.is_file():
        return [whole]
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_bytes())
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _tensors(fd: int) -> Iterator[_Stored]:
    # By hand, because the library maps files, and one that is cut short then kills the process.
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    for name, entry in json.loads(os.pread(fd, size, 8)).items():
        if name != "__metadata__" and entry["dtype"] in _DTYPES:
            shape = tuple(entry["shape"])
            yield _Stored(name, _DTYPES[entry["dtype"]], shape, 8 + size + entry["data_offsets"][0])


def _differs(tensor: torch.Tensor, stored: _Stored, fd: int) -> bool:
    if tuple(tensor.shape) != stored.shape:
        return True
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return False
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)
    num_rows, width = rows.shape
    seen = min(width, _MAX_ROW_BYTES // stored.dtype.itemsize)
    for row in sorted({0, num_rows // 2, num_rows - 1}):
        data = os.pread(
            fd, seen * stored.dtype.itemsize, stored.offset + row * width * stored.dtype.itemsize
        )
        expected = torch.frombuffer(bytearray(data), dtype=stored.dtype).to(tensor.dtype)
        if not torch.equal(expected, rows[row, :seen].cpu()):
            return True
    return False
