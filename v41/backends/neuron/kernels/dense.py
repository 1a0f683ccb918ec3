# SPDX-License-Identifier: Apache-2.0
"""Kernel arguments as the device wants them: contiguous, from the start of their storage."""

import torch
from torch import Tensor


def dense(t: Tensor, *shape: int) -> Tensor:
    """t in another shape; copied where it is not contiguous or does not begin its storage, since a kernel sees the storage."""
    t = t.reshape(shape)
    return t if t.is_contiguous() and t.storage_offset() == 0 else t.clone(memory_format=torch.contiguous_format)
