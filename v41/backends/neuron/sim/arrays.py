# SPDX-License-Identifier: Apache-2.0
"""The boundary: numpy arrays and torch tensors in, the same kind out. torch is imported only when a tensor is seen."""

import sys
from dataclasses import dataclass

import numpy as np

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.dtypes import SPECS, as_dtype, from_float32, to_float32
from v41.backends.neuron.sim.errors import SimError
from v41.backends.neuron.sim.memory import SHARED_HBM
from v41.backends.neuron.sim.storage import Storage
from v41.backends.neuron.sim.tensor import NkiTensor


@dataclass(frozen=True)
class Typed:
    """An array of a dtype that numpy lacks: container codes (bfloat16: uint16, fp8: uint8) and the NKI dtype."""

    codes: np.ndarray
    dtype: str

    @property
    def shape(self):
        """Shape."""
        return self.codes.shape

    def float32(self):
        """Values as float32."""
        return to_float32(self.codes, self.dtype)


def typed(values, dtype):
    """float values rounded to an NKI dtype."""
    dtype = as_dtype(dtype)
    return Typed(from_float32(np.asarray(values, np.float32), dtype), dtype)


def is_torch(x):
    """Whether x is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_array(x):
    """Whether x becomes an HBM tensor."""
    return isinstance(x, (np.ndarray, Typed)) or is_torch(x)


def _codes(x):
    if isinstance(x, Typed):
        return x.codes, x.dtype
    if is_torch(x):
        import torch

        dtype = as_dtype(x.dtype)
        x = x.detach()
        container = SPECS[dtype].container
        same = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.float32}
        if x.dtype not in same and dtype != "bool":
            x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[container.itemsize])
        return x.numpy().view(container), dtype
    dtype = as_dtype(x.dtype)
    return x.view(SPECS[dtype].container), dtype


def to_hbm(x, name):
    """A kernel input over the caller's memory; it is copied before the kernel's first write."""
    if is_torch(x) and (not x.is_contiguous() or x.storage_offset()):
        detail = f"argument {name}: strides {x.stride()} of {tuple(x.shape)}, storage offset {x.storage_offset()}"
        raise SimError("PLACE-CONTIGUOUS", detail, operand=name)
    try:
        codes, dtype = _codes(x)
    except ValueError as error:
        raise SimError("TYPE-DTYPE", f"argument {name}: {error}", operand=name) from None
    if not codes.flags.c_contiguous:
        raise SimError("PLACE-CONTIGUOUS", f"argument {name}: strides {codes.strides} of {codes.shape}", operand=name)
    if codes.size == 0 or codes.ndim == 0:
        raise SimError("OP-ARG", f"argument {name}: shape {codes.shape}", operand=name)
    data = codes.reshape(-1).view(np.uint8)
    storage = Storage(SHARED_HBM, "input", codes.shape, codes.dtype.itemsize, data, name)
    return NkiTensor(storage, dtype, codes.shape, layout.row_major(codes.shape), name=name)


def from_hbm(t, to_torch):
    """A kernel result as a fresh array: torch, or numpy (Typed where numpy lacks the dtype)."""
    codes = t.codes().copy()
    if to_torch:
        return _to_torch(codes, t.dtype)
    if t.dtype == "bool":
        return codes.astype(bool)
    return Typed(codes, t.dtype) if SPECS[t.dtype].kind == "code" else codes


def _to_torch(codes, dtype):
    import torch

    if dtype == "float8_e4m3":
        # torch has no IEEE-like e4m3: the bytes are returned as they are.
        return torch.from_numpy(codes)
    names = {"tfloat32": "float32"}
    target = getattr(torch, names.get(dtype, dtype))
    if codes.dtype in (np.uint16, np.uint32):
        signed = torch.from_numpy(codes.view(f"i{codes.itemsize}"))
        return signed.view(target)
    result = torch.from_numpy(codes)
    return result.view(target) if target != result.dtype else result
