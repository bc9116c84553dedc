"""The weights of a loaded model, compared with the files of its directory. `HostModel` calls it."""

# ruff: noqa: ANN401 - the models of Transformers share no typed surface.

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.plain_kv import UNRUNNABLE
from kvferry.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that loading may turn into one another."""

_PACKED_DTYPES = {
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32},
    **{"I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes of packed weights and of what belongs to them. A tensor that has another one in memory was
unpacked, so it cannot be compared."""

_MAX_HEADER_BYTES = 100 << 20
"""The bound of the safetensors format itself."""

_MAX_ROW_BYTES = 64 * 1024
_PARTS = 8
"""One row in each of so many parts of a tensor is compared: a file may hold several as one."""

_PIECE = 1 << 20
"""Elements that are compared at a time."""

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""Errors of files that are not as they should be."""


class _Stored(NamedTuple):
    """A tensor in a file."""

    fd: int
    data_start: int
    header: Mapping[str, Any]


def refuse_other_weights(
    model: Any, state: Mapping[str, torch.Tensor], directory: Path, *, is_packed: bool = False
) -> None:
    """Refuse tensors that differ from those stored in `directory`.

    Compares some rows of every tensor, in the form in which Transformers would save it: under the
    name of the files, and parted where loading made one of several. The identity is a digest of
    the files, which cannot show that a model was trained, merged or patched in memory after it was
    loaded. Such a change alters nearly every row, so a few rows show it.

    Reads the files that Transformers would load. Skips tensors that it unpacks or cannot turn back,
    formats other than safetensors, and files that cannot be read; a log line says how many are
    skipped.

    Args:
        state: of the model.
        is_packed: the model was published quantised, so that loading may give tensors another
            shape.

    Raises:
        ConfigError: a tensor that differs.
    """
    with ExitStack() as opened:
        files = _open_tensors(directory, opened)
        differing, seen = _compare(files, _forms_by_module(model, state), state, is_packed)
        if differing:  # maybe a part of what the files hold as one
            whole = [(list(state), _forms_in_files(model, state))]
            differing, seen = _compare(files, whole, state, is_packed)
    if differing:
        raise ConfigError(
            f"the model's {differing} is not the one in {directory}: it was changed after "
            "loading; save it to a directory of its own and load it from there, or pass a "
            "weights_version"
        )
    skipped = [name for name, each in state.items() if each.data_ptr() not in seen]
    if skipped:
        logger.info(
            "%d of the model's %d tensors are stored in another form than in memory and were not "
            "compared with %s: %s, ...",
            *(len(skipped), len(state), directory, skipped[0]),
        )


def _open_tensors(directory: Path, opened: ExitStack) -> dict[str, _Stored]:
    """Return the stored tensors by name. `opened` closes their files."""
    found: dict[str, _Stored] = {}
    for path in _files(directory):
        try:
            fd = opened.enter_context(path.open("rb")).fileno()
            header, start = _header(fd)
        except _UNREADABLE:
            continue
        found.update((name, _Stored(fd, start, each)) for name, each in header.items())
    return found


_Forms = tuple[list[str], Mapping[str, torch.Tensor]]
"""Names of tensors in memory, and these tensors as Transformers would save them."""


def _forms_by_module(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[_Forms]:
    """Yield the tensors of one module after another, since turning them back may copy them."""
    for _, group in groupby(state, lambda name: name.rpartition(".")[0]):
        held = {name: state[name] for name in group}
        yield list(held), _forms_in_files(model, held)


def _forms_in_files(model: Any, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a release of Transformers that saves all under its names in memory
        return state
    try:
        forms: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    except UNRUNNABLE:
        return state
    return forms


def _compare(
    files: Mapping[str, _Stored],
    all_forms: Iterable[_Forms],
    state: Mapping[str, torch.Tensor],
    is_packed: bool,
) -> tuple[str, set[int]]:
    """Return the name of the first tensor that differs, empty if none does, and the addresses of
    those that were compared."""
    seen: set[int] = set()
    for names, forms in all_forms:
        agreed = {
            name: _agrees(tensor, files.get(name), is_packed) for name, tensor in forms.items()
        }
        if False in agreed.values():
            return next(name for name, each in agreed.items() if each is False), seen
        seen.update(forms[name].data_ptr() for name, each in agreed.items() if each)
        if all(each or forms[name].data_ptr() in seen for name, each in agreed.items()):  # or tied
            seen.update(state[name].data_ptr() for name in names)
    return "", seen


def _agrees(tensor: torch.Tensor, stored: _Stored | None, is_packed: bool) -> bool | None:
    """Whether some rows of a tensor are the stored ones; None if it cannot be told."""
    if stored is None:
        return None
    try:
        dtype = _comparable_dtype(tensor, stored.header["dtype"])
        has_its_shape = tuple(tensor.shape) == tuple(stored.header["shape"])
        if dtype is None or (is_packed and not has_its_shape):
            return None
        return has_its_shape and not _differs(tensor, dtype, stored)
    except _UNREADABLE:
        return None


def refuse_unread_weights(model: Any, directory: Path) -> None:
    """Refuse parameters that no file of `directory` held: Transformers fills them with random
    numbers, others in each process.

    Loading marks what it read. Of models that it did not load, and of releases of Transformers
    that mark nothing, nothing is known.

    Raises:
        ConfigError: such a parameter.
    """
    unread = [name for name, each in model.named_parameters() if not _is_read(each)]
    if len(unread) == sum(1 for _ in model.parameters()):
        return
    stored = tuple(_names_in_files(directory)) if unread else ()
    for name in unread:
        # A weight that was unpacked has the beginning of the names of its parts.
        if not any(each.startswith(name) for each in stored):
            raise ConfigError(
                f"{directory} has no file with the model's {name}: it was made at random when the "
                "model was loaded, or put there later; load the directory with the class that its "
                "config.json names, or save the model to a directory of its own"
            )


def _is_read(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "_is_hf_initialized", False))


def _names_in_files(directory: Path) -> Iterator[str]:
    for path in _files(directory):
        try:
            with path.open("rb") as file:
                yield from _header(file.fileno())[0]
        except _UNREADABLE:
            continue


def is_all_of_files(state: Mapping[str, torch.Tensor], directory: Path) -> bool:
    """Whether every tensor is to the last element one of the files that Transformers loads by
    default: then others in `directory`, such as a pytorch_model.bin, do not matter, whichever it
    was read from. Reads those files whole."""
    places = set()
    for path in _files(directory):
        try:
            with path.open("rb") as file:
                header, start = _header(file.fileno())
                for name in header.keys() & state.keys():
                    if not _is_equal(state[name], header[name], file.fileno(), start):
                        return False
                    places.add(state[name].data_ptr())
        except _UNREADABLE:
            return False
    return all(tensor.data_ptr() in places for tensor in state.values())  # or tied to one


def _header(fd: int) -> tuple[dict[str, Any], int]:
    """Return what a file holds, by name, and where the data begin."""
    # By hand: the library maps files, and a mapped file that is cut short kills the process.
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    return json.loads(os.pread(fd, size, 8)), 8 + size


def _comparable_dtype(tensor: torch.Tensor, stored: str) -> torch.dtype | None:
    """Return the dtype of a stored tensor; None if one of the two was packed or unpacked."""
    if tensor.dtype in _DTYPES.values():
        return _DTYPES.get(stored)
    dtype = _PACKED_DTYPES.get(stored)
    return dtype if dtype == tensor.dtype else None


def _files(directory: Path) -> list[Path]:
    """Return the files that Transformers loads: one whole file, else the files of the index."""
    whole = directory / "model.safetensors"
    if whole.is_file():
        return [whole]
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_bytes())
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _differs(tensor: torch.Tensor, dtype: torch.dtype, stored: _Stored) -> bool:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return False
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)
    num_rows, width = rows.shape
    seen = min(width, _MAX_ROW_BYTES // dtype.itemsize)
    start = stored.data_start + stored.header["data_offsets"][0]
    for row in sorted({num_rows * part // _PARTS for part in range(_PARTS)} | {num_rows - 1}):
        place = start + row * width * dtype.itemsize
        data = os.pread(stored.fd, seen * dtype.itemsize, place)
        expected = torch.frombuffer(bytearray(data), dtype=dtype).to(tensor.dtype)
        if not _are_equal(expected, rows[row, :seen].cpu()):
            return True
    return False


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype in _PACKED_DTYPES.values():  # float8 has no comparison
        one, other = one.view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(one, other)


def _is_equal(tensor: torch.Tensor, stored: Mapping[str, Any], fd: int, data_start: int) -> bool:
    dtype = _DTYPES.get(stored["dtype"])
    is_alike = tuple(tensor.shape) == tuple(stored["shape"]) and tensor.device.type != "meta"
    if dtype is None or not is_alike:
        return False
    flat, begin = tensor.detach().reshape(-1), data_start + stored["data_offsets"][0]
    for piece in range(0, flat.numel(), _PIECE):
        held = flat[piece : piece + _PIECE].cpu()
        size = held.numel() * dtype.itemsize
        data = os.pread(fd, size, begin + piece * dtype.itemsize)
        if not torch.equal(torch.frombuffer(bytearray(data), dtype=dtype).to(held.dtype), held):
            return False
    return True
