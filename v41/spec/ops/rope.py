# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding (docs/model.md 4): adjacent pairs of the last `rope` dims, angles as fp32 products."""

import math

import torch
from torch import Tensor

from v41.spec.config import Config, Yarn
from v41.spec.ops.norm import wide
from v41.spec.types import F32, I32, Act


def frequencies(dim: int, base: float, yarn: Yarn | None) -> F32[Tensor, "half"]:
    """f_i = base^(-2i/dim) in fp32; with YaRN slow pairs are divided by the factor, ramped between the corrected dims."""
    f = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    if yarn is None:
        return f

    def corrected(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(corrected(yarn.beta_fast)), 0)
    high = min(math.ceil(corrected(yarn.beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    smooth = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return f / yarn.factor * (1 - smooth) + f * smooth


def layer_frequencies(config: Config, ratio: int) -> F32[Tensor, "half"]:
    """One table a layer serves queries, window rows, compressed rows and the indexer: YaRN and its base where the layer compresses."""
    if ratio == 0:
        return frequencies(config.qk_rope_head_dim, config.rope_theta, None)
    return frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)


def rope(x: Act[Tensor, "*rows n"], positions: I32[Tensor, "*lead"], f: F32[Tensor, "half"]) -> Act[Tensor, "*rows n"]:
    """(x + iy) e^(ia) on the last 2 * half dims, a = fp32(position) * f rounded to fp32; positions index the leading dims of x."""
    return _rotate(x, positions, f, 1.0)


def rope_inverse(x: Act[Tensor, "*rows n"], positions: I32[Tensor, "*lead"], f: F32[Tensor, "half"]) -> Act[Tensor, "*rows n"]:
    """The conjugate rotation."""
    return _rotate(x, positions, f, -1.0)


def _rotate(x: Tensor, positions: Tensor, f: Tensor, sign: float) -> Tensor:
    angle = wide_like((positions.float()[..., None] * f.to(x.device)), x)
    angle = angle.reshape(positions.shape + (1,) * (x.ndim - positions.ndim - 1) + f.shape)
    turned = torch.polar(torch.ones_like(angle), angle)  # the release's way; cos() and sin() differ from it in the last bit
    cos, sin = turned.real, turned.imag * sign
    keep, turn = x[..., : x.shape[-1] - 2 * f.shape[0]], x[..., x.shape[-1] - 2 * f.shape[0] :]
    a, b = wide(turn).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


def wide_like(angle: Tensor, x: Tensor) -> Tensor:
    """The angle in the dtype that x is rotated in; its value stays the fp32 product."""
    return angle.double() if x.dtype == torch.float64 else angle
