# SPDX-License-Identifier: Apache-2.0
"""Number formats: scales, codes and round trips (docs/model.md 2). Powers of two come from exponent bits, never from a float log2."""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.table import Folded, Fp4, Fp8, Fp8Rows, Tiled
from v41.spec.types import BF16, E4M3, E8M0, F32, I8, Act

BLOCK, KV_BLOCK = 32, 16
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighboring e2m1 values, and whether a tie goes up: ties go to the even code.
MIDDLES, TIE_UP = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True, False, True, False, True, False)


def pow2_scale(amax: F32[Tensor, "*blocks"], maximum: float) -> F32[Tensor, "*blocks"]:
    """2^ceil(log2 y), y = amax * fp32(1/maximum): the exponent field of y, plus one where the mantissa is not zero."""
    bits = (amax * torch.tensor(1.0 / maximum, dtype=torch.float32, device=amax.device)).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def scale_byte(scale: F32[Tensor, "*blocks"]) -> E8M0[Tensor, "*blocks"]:
    """The e8m0 byte of a power of two: its exponent field."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def scale_value(scale: E8M0[Tensor, "*blocks"]) -> F32[Tensor, "*blocks"]:
    """2^(byte - 127), exact; byte 0 is 2^-127, a subnormal of fp32."""
    return scale.float()


def blocks_of(x: Act[Tensor, "*rows n"], size: int) -> F32[Tensor, "*rows blocks size"]:
    return x.float().unflatten(-1, (-1, size))


def act_quant(x: Act[Tensor, "*rows n"], numerics: Numerics) -> tuple[E4M3[Tensor, "*rows n"], E8M0[Tensor, "*rows blocks"]]:
    """fp8 codes of an activation, groups of 32: s = P2(max(amax, 1e-4), m), q = e4m3(clamp(x / s, -m, m)), to nearest even; m is 448, 240 in `trn2`."""
    codes, scale = act_codes(x, numerics)
    return codes.flatten(-2), scale_byte(scale)


def act_codes(x: Act[Tensor, "*rows n"], numerics: Numerics) -> tuple[E4M3[Tensor, "*rows blocks 32"], F32[Tensor, "*rows blocks"]]:
    """The codes of `act_quant` by block, and their scales as numbers."""
    blocks = blocks_of(x, BLOCK)
    scale = pow2_scale(blocks.abs().amax(-1).clamp_min(1e-4), numerics.e4m3_max)
    return (blocks / scale[..., None]).clamp(-numerics.e4m3_max, numerics.e4m3_max).to(torch.float8_e4m3fn), scale


def act_round(x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The round trip of `act_quant`; exact in bfloat16, since a code has 4 significant bits."""
    codes, scale = act_codes(x, numerics)
    return (codes.float() * scale[..., None]).flatten(-2).to(x.dtype)


def e2m1_round(v: F32[Tensor, "*n"]) -> F32[Tensor, "*n"]:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with v's sign, ties to the even code; v must lie in -6..6."""
    a, code = v.abs(), torch.zeros_like(v, dtype=torch.int32)
    for middle, up in zip(MIDDLES, TIE_UP, strict=True):
        code = code + (a >= middle if up else a > middle).to(torch.int32)
    return torch.copysign(torch.tensor(E2M1, device=v.device)[code.long()], v)


def e2m1_pack(v: F32[Tensor, "*rows n"]) -> I8[Tensor, "*rows n//2"]:
    """Packed codes of e2m1 values: even columns in the low nibble; -0 keeps its sign bit."""
    code = torch.bucketize(v.abs(), torch.tensor(E2M1, device=v.device)) + 8 * torch.signbit(v)
    low, high = code[..., 0::2], code[..., 1::2]
    return (low | (high << 4)).to(torch.uint8).view(torch.int8)


def index_quant(x: Act[Tensor, "*rows n"]) -> tuple[F32[Tensor, "*rows blocks 32"], F32[Tensor, "*rows blocks"]]:
    """e2m1 values and power-of-two scales of index queries and keys, groups of 32: s = P2(max(amax, 6 * 2^-126), 6)."""
    blocks = blocks_of(x, BLOCK)
    scale = pow2_scale(blocks.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126), E2M1_MAX)
    return e2m1_round((blocks / scale[..., None]).clamp(-E2M1_MAX, E2M1_MAX)), scale


def index_round(x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The round trip of `index_quant`; exact in bfloat16."""
    values, scale = index_quant(x)
    return (values * scale[..., None]).flatten(-2).to(x.dtype)


def kv_quant(x: Act[Tensor, "*rows n"], numerics: Numerics) -> tuple[F32[Tensor, "*rows blocks 16"], E4M3[Tensor, "*rows blocks"]]:
    """e2m1 values and e4m3 scales of compressed rows, groups of 16: s = e4m3(min(max(amax, 6 * 2^-9) / 6, 448)), which may round down.

    `trn2` has 240 for 448, multiplies by fp32(1/6) and by the reciprocal of s: the hardware does not divide.
    """
    blocks = blocks_of(x, KV_BLOCK)
    amax = blocks.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-9)
    sixth = amax * (1.0 / E2M1_MAX) if numerics.device else amax / E2M1_MAX
    scale = sixth.clamp_max(numerics.e4m3_max).to(torch.float8_e4m3fn)
    wide = scale.float()[..., None]
    scaled = blocks * wide.reciprocal() if numerics.device else blocks / wide
    return e2m1_round(scaled.clamp(-E2M1_MAX, E2M1_MAX)), scale


def kv_round(x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The round trip of `kv_quant`; exact in bfloat16, since a value has at most 6 significant bits."""
    values, scale = kv_quant(x, numerics)
    return (values * scale.float()[..., None]).flatten(-2).to(x.dtype)


def e2m1_unpack(packed: I8[Tensor, "*rows half"], dtype: torch.dtype) -> Act[Tensor, "*rows 2*half"]:
    """Values of packed codes; code 8 is -0."""
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype, device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # by byte: low nibble, high nibble
    return pairs[packed.view(torch.uint8).int()].flatten(-2)


def dequantize(
    w: Fp8 | Fp8Rows | Fp4 | Tiled | Folded | BF16[Tensor, "*stack out in"] | F32[Tensor, "*stack out in"], dtype: torch.dtype
) -> Act[Tensor, "*stack out in"]:
    """code * scale in `dtype`: exact in float32 and float64, and in bfloat16 down to scales of 2^-117. A weight in bfloat16 is its own value."""
    if isinstance(w, Tensor):
        return w.to(dtype)
    if isinstance(w, Tiled):
        return w.weight.permute(0, 3, 2, 1).flatten(2).flatten(0, 1)[:, : w.inner].contiguous().to(dtype)
    if isinstance(w, Folded):
        return w.weight.to(dtype) * w.scale.to(dtype).repeat_interleave(w.rows, -1)[..., : w.weight.shape[-2], None]
    if isinstance(w, Fp4):
        return _scaled(e2m1_unpack(w.weight, dtype), scale_value(w.scale))
    scale = scale_value(w.scale)
    if isinstance(w, Fp8):
        scale = scale.repeat_interleave(BLOCK, 0)[: w.weight.shape[0]]
    return _scaled(w.weight.to(dtype), scale)


def _scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes times a scale per row and 32 columns; the last block may be narrower."""
    wide = scale.to(codes.dtype).repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return codes * wide
