# SPDX-License-Identifier: Apache-2.0
"""Stored values that no released tensor may have."""

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 24  # bytes looked at together


def check_values(name: str, tensor: Tensor) -> None:
    """Refuses E8M0 byte 255 and E4M3 codes 0x7F and 0xFF, which are NaN, with the tensor and the first index; other dtypes pass."""
    if tensor.dtype not in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        return
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    mask = 0x7F if tensor.dtype == torch.float8_e4m3fn else 0xFF
    for first in range(0, len(raw), BLOCK):
        bad = (raw[first : first + BLOCK] & mask) == mask
        if bad.any():
            flat = first + int(bad.to(torch.uint8).argmax())
            index = [int(part) for part in np.unravel_index(flat, tuple(tensor.shape))]
            raise ValueError(f"{name}: byte 0x{int(raw[flat]):02X} at {index} is NaN in {tensor.dtype}")
