# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files with the standard library and decodes them with formats.py."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import formats

SHORT = {"BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1"}  # kept as codes
STORED = SHORT | {"I8": "i1", "U8": "u1", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "BOOL": "?"}
DECODE = {"BF16": formats.bf16_values, "F8_E4M3": formats.e4m3_values, "F8_E8M0": formats.e8m0_values}


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in the file: codes for the short float formats, plain numbers for the others."""

    dtype: str
    codes: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """Float64 for every float format, the plain array for integers and booleans."""
        if self.dtype in DECODE:
            return DECODE[self.dtype](self.codes)
        with np.errstate(invalid="ignore"):  # a signalling NaN among stored float32 numbers
            return self.codes.astype(np.float64) if self.dtype in ("F32", "F64") else self.codes


def read(path: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file: 8 bytes header length, a JSON header, then the bytes."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        codes = np.frombuffer(data[begin:end], STORED[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = Stored(entry["dtype"], codes)
    return tensors


def read_all(directory: Path) -> dict[str, Stored]:
    """Every tensor of every safetensors file in a directory."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(read(path))
    return tensors


def tile_values(weight, scale) -> np.ndarray:
    """FP8 weight [n, k]: e4m3 code times the e8m0 scale of its 32 x 32 tile [ceil(n / 32), ceil(k / 32)]."""
    rows, columns = weight.shape
    spread = np.repeat(np.repeat(formats.e8m0_values(scale), 32, 0), 32, 1)[:rows, :columns]
    return formats.e4m3_values(weight) * spread


def row_values(weight, scale) -> np.ndarray:
    """FP8 table row: e4m3 code times the e8m0 scale of its row and 32 columns."""
    return formats.e4m3_values(weight) * np.repeat(formats.e8m0_values(scale), 32, -1)


def packed_values(weight, scale) -> np.ndarray:
    """FP4 weight [n, k / 2]: e2m1 code times the e8m0 scale [n, k / 32] of its row and 32 columns."""
    return formats.e2m1_unpack(weight) * np.repeat(formats.e8m0_values(scale), 32, -1)
