"""One safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes.

Read through a memory map, so that opening costs the header alone and a tensor's bytes are read when it is used. The
safetensors package's own NumPy reader lacks float8.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dsa_jax.checks import require

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # the format's own: the header is padded with spaces so that the data starts on it


class StoredTensor(NamedTuple):
    """Where a tensor lies: its dtype and shape, and the byte in the file at which it starts."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, mapped: np.ndarray) -> np.ndarray:
        """The tensor, as a read-only view into `mapped`, the file's memory map."""
        return mapped[self.start : self.start + self.nbytes].view(self.dtype).reshape(self.shape)


def map_file(file: Path) -> np.ndarray:
    """The file's bytes, read-only; the system reads a page when it is touched."""
    return np.memmap(file, np.uint8, mode="r")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, none of them read. Raises ValueError naming the file if it is cut short or malformed."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        data_start = 8 + int.from_bytes(stream.read(8), "little")
        whole = size >= 8 and data_start <= size
        require(whole, str(file), f"{size} bytes", f"at least {data_start} bytes, as its header says")
        try:
            header = json.loads(stream.read(data_start - 8))
        except ValueError as error:
            raise ValueError(f"{file} has no safetensors header: {error}") from error
    require(isinstance(header, dict), f"{file}'s header", type(header).__name__, "a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        require(tensor.start == end, f"{name} in {file}: first byte", tensor.start, f"{end}, where the one before ends")
        end += tensor.nbytes
    require(end == size, str(file), f"{size} bytes", f"{end} bytes, as its header says")
    return tensors


def write_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the tensors, float32, bfloat16 or float8_e4m3fn, and waits until they are on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{name} in {file}"
    require(isinstance(entry, dict), where, repr(entry), "a JSON object")
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    require(isinstance(kind, str) and kind in DTYPES, f"{where}: dtype", repr(kind), "one of " + ", ".join(DTYPES))
    require(_are_lengths(shape), f"{where}: shape", shape, "a list of lengths")
    require(_are_lengths(offsets) and len(offsets) == 2, f"{where}: data_offsets", offsets, "two offsets")
    tensor = StoredTensor(file, DTYPES[kind], tuple(shape), data_start + offsets[0])
    require(offsets[1] - offsets[0] == tensor.nbytes, f"{where}: data_offsets", offsets, f"{tensor.nbytes} bytes apart")
    return tensor


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
