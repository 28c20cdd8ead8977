"""Tensors in a `pytorch_model.bin`: the one place where a pickle is opened, and never trusted.

Always `weights_only=True`: a pickle that asks for anything but tensors and plain containers is
refused, not run. Files of torch's zip format are mapped, so that names and shapes are known before
a byte of a tensor is read, and the mapping is renewed as the tensors go by: pages already copied
out would otherwise count as memory of this process, and loading would hold the weights twice.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

REMAP_FRACTION = 8
"""The mapping is renewed after every 1/8 of the file: memory stays near 1.13 x the weights."""


class PickledFile:
    """One `.bin` file. `header` maps each tensor's name to its (dtype, shape).

    Raises ValueError, naming the file, if it is truncated, corrupt, or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_zip = _is_whole_zip(path)
        self._remap_bytes = path.stat().st_size // REMAP_FRACTION
        self._read_bytes = 0
        self._state = self._open()
        self.header = {k: (_dtype_name(t), tuple(t.shape)) for k, t in self._state.items()}

    def read(self, key: str, rows: slice = slice(None)) -> NDArray[np.generic]:
        """A copy of tensor `key` (or of some of its rows), C-contiguous; bfloat16 as uint16.

        A tensor is read whole once only: of a file that could not be mapped it is let go.
        """
        whole = rows == slice(None)
        tensor = self._state[key] if self._is_zip or not whole else self._state.pop(key)
        tensor = tensor.detach()[rows].contiguous()
        if tensor.dtype == torch.bfloat16:
            data: NDArray[np.generic] = tensor.view(torch.int16).numpy().view(np.uint16).copy()
        else:
            data = tensor.numpy().copy()
        self._read_bytes += data.nbytes
        if self._is_zip and self._read_bytes > self._remap_bytes:
            self._state, self._read_bytes = self._open(), 0
        return data

    def _open(self) -> dict[str, torch.Tensor]:
        # torch maps only its zip format; the older one (GPT-2's own 2019 files) is read whole.
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._is_zip)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{self.path} is corrupt, or asks for Python objects that are not tensors; such a "
                "file is never run. Save its state_dict alone, or as safetensors"
            ) from error
        except (RuntimeError, ValueError, EOFError, KeyError, AssertionError) as error:
            raise ValueError(
                f"{self.path} is truncated or corrupt: {_first_line(error)}"
            ) from error
        if not isinstance(state, Mapping):
            raise ValueError(f"{self.path} holds a {type(state).__name__}, not named tensors")
        others = sorted(str(k) for k, v in state.items() if not isinstance(v, torch.Tensor))
        if others:
            raise ValueError(
                f"{self.path} is a training checkpoint, not a state_dict: {', '.join(others)} are "
                "no tensors; if it is nanoGPT's: python scripts/convert_checkpoint.py nanogpt "
                f"{self.path} --out FOLDER"
            )
        return dict(state)


def _is_whole_zip(path: Path) -> bool:
    """Whether torch's zip format it is; a zip's table of contents is at its end."""
    with path.open("rb") as file:
        starts_as_zip = file.read(4) == b"PK\x03\x04"
    if starts_as_zip and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is truncated: it starts as torch writes it and does not end so")
    return starts_as_zip


def _dtype_name(tensor: torch.Tensor) -> str:
    """`float32`, ...; a layout that numpy has no array for is named with its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if tensor.layout == torch.strided else f"{tensor.layout} {name}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
