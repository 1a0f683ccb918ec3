# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, before anything is computed. Those that read values run here, outside the pure functions."""

import math
from typing import Any

import torch
from torch import Tensor

from v41.spec.cache import Cache
from v41.spec.config import Config
from v41.spec.handed import Boundary
from v41.spec.ops.choose import Sample
from v41.spec.params import Params

ROWS = ("all", "last", "none")


def same_model(params: Params, cache: Cache) -> None:
    kind("params", params, Params)
    kind("cache", cache, Cache)
    if cache.config != params.config:
        raise ValueError("cache: made for another config than params")
    if cache.numerics != params.numerics:
        raise ValueError(f"cache: made for numerics {cache.numerics.describe()}, params have {params.numerics.describe()}")


def kind(name: str, value: Any, wanted: type) -> Any:
    """value; ValueError when it is of another type."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name}: a {type(value).__name__}, not {wanted.__name__}")
    return value


def tensor_of(name: str, value: Any, device: torch.device) -> Tensor:
    """value as a tensor, a list of numbers too; ValueError where it is neither."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{name}: {value!r} is no tensor or list of numbers ({e})") from e


def integers(name: str, value: Any, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
    """value as an integer tensor of the shape (None: any size above 0) on the device; ValueError otherwise."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: a {type(value).__name__}, not a tensor")
    if value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {value.dtype}, not torch.int32 or torch.int64")
    same_shape(name, value, shape)
    if value.device != device:
        raise ValueError(f"{name}: on {value.device}, the cache is on {device}")
    return value


def same_shape(name: str, value: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = value.ndim == len(shape) and all(got == want if want is not None else got > 0 for got, want in zip(value.shape, shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: shape {list(value.shape)}, not [{', '.join('any' if s is None else str(s) for s in shape)}]")


def valid_rows(value: Any, batch: int, rows: int, device: torch.device) -> Tensor:
    """`valid` as int32 [batch], all rows by default; ValueError with the sequence where it leaves 0..rows."""
    if value is None:
        return torch.full((batch,), rows, dtype=torch.int32, device=device)
    value = integers("valid", tensor_of("valid", value, device), (batch,), device)
    first_bad("valid", (value < 0) | (value > rows), value, f"leaves 0..{rows}")
    return value.to(torch.int32)


def first_bad(name: str, bad: Tensor, value: Tensor, text: str) -> None:
    """ValueError for the first marked element, with its sequence (and row)."""
    if bad.any():
        at = [int(i) for i in bad.nonzero()[0]]
        where = f"sequence {at[0]}" + (f", row {at[1]}" if len(at) > 1 else "")
        raise ValueError(f"{name}: {int(value[tuple(at)])} at {where} {text}")


def token_ids(name: str, tokens: Tensor, live: Tensor, config: Config) -> None:
    """Ids in the vocabulary and no image; rows that are not live may hold anything."""
    first_bad(name, live & ((tokens < 0) | (tokens >= config.vocab_size)), tokens, f"is not a token id (0..{config.vocab_size - 1})")
    if config.image_token_id is not None:
        first_bad(name, live & (tokens == config.image_token_id), tokens, "is the image token: there is no vision part, only text")


def fits(cache: Cache, valid: Tensor) -> None:
    """ValueError where a sequence would outgrow the capacity."""
    over = cache.length + valid > cache.capacity
    if over.any():
        b = int(over.nonzero()[0])
        raise ValueError(f"tokens: sequence {b} holds {int(cache.length[b])} positions and gets {int(valid[b])} more, the capacity is {cache.capacity}")


def first_position(cache: Cache, valid: Tensor, rows: int) -> int | None:
    """The first position as a number where the numerics follow the released calls, else None.

    Those calls are one prefill from empty, then one row at a time, at equal lengths; ValueError for anything else.
    """
    numerics = cache.numerics
    if not numerics.needs_start:
        return None
    what = f"regime {numerics.regime!r} with index_keys {numerics.index_keys!r}"
    start = int(cache.length[0])
    if (cache.length != start).any():
        raise ValueError(f"cache: {what} takes equal lengths only, these are {cache.length.tolist()}")
    if (valid != rows).any():
        raise ValueError(f"valid: {what} takes whole calls only; valid is {valid.tolist()} of {rows} rows")
    if start and rows > 1:
        raise ValueError(f"tokens: {what} takes one prefill from empty, then one row at a time; {rows} rows at position {start}")
    return start


def logit_rows(value: str | None, params: Params) -> str:
    """Which rows get logits: "all" by default, "last" in `released`, which knows no other but "none"."""
    compact = params.numerics.compact
    value = ("last" if compact else "all") if value is None else value
    if value not in ROWS or (compact and value == "all"):
        raise ValueError(f"logits: {value!r} is not one of {ROWS[1:] if compact else ROWS} (regime {params.numerics.regime!r})")
    return value


def rewind_length(cache: Cache, length: Any) -> Tensor:
    """The lengths to go back to, int32 [batch]; ValueError where that is no earlier state or more than `slack` below the mark."""
    kind("cache", cache, Cache)
    length = integers("length", tensor_of("length", length, cache.length.device), (cache.batch,), cache.length.device)
    first_bad("length", length < 0, length, "is negative")
    first_bad("length", length > cache.length, length, f"is beyond the positions held, {cache.length.tolist()}")
    far = cache.high - length > cache.slack
    if far.any():
        b = int(far.nonzero()[0])
        raise ValueError(
            f"length: sequence {b} once held {int(cache.high[b])} positions; rewinding to {int(length[b])} goes back "
            f"{int(cache.high[b] - length[b])}, the slack is {cache.slack}"
        )
    return length.to(torch.int32)


def joins(cache: Cache, boundary: Boundary) -> None:
    """ValueError when a cache is not the one that `embed` advanced for this boundary."""
    kind("boundary", boundary, Boundary)
    if boundary.stream.shape[0] != cache.batch:
        raise ValueError(f"boundary: {boundary.stream.shape[0]} sequences, the cache has {cache.batch}")
    end = boundary.call.end
    if (cache.length != end).any():
        raise ValueError(f"cache: holds {cache.length.tolist()} positions, the boundary ends at {end.tolist()}; it is not the one that embed gave")


def draws(sample: Sample, batch: int, block: int) -> None:
    """ValueError for a Sample of other types or shapes, a negative temperature, a top_p outside 0..1 or a uniform outside 0..1."""
    kind("sample", sample, Sample)
    for name, shape, most in (("temperature", (batch,), math.inf), ("top_p", (batch,), 1.0), ("uniforms", (batch, block), 1.0)):
        value = kind(f"sample.{name}", getattr(sample, name), Tensor)
        if value.dtype != torch.float32:
            raise ValueError(f"sample.{name}: dtype {value.dtype}, not torch.float32")
        same_shape(f"sample.{name}", value, shape)
        bad = ~((value >= 0) & (value <= most)) | (value == most if name == "uniforms" else value != value)
        if bad.any():
            at = [int(i) for i in bad.nonzero()[0]]
            raise ValueError(f"sample.{name}: {float(value[tuple(at)])} at {at} leaves 0..{most}")
