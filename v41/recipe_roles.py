# SPDX-License-Identifier: Apache-2.0
"""What each tensor of the released layout is for, as the numbers that the weight recipe draws it with (docs/recipe.md)."""

import re
from dataclasses import dataclass, replace

import torch

from v41.recipe_words import key


@dataclass(frozen=True)
class Role:
    """How a tensor is drawn: root mean square gain / 100 about mean / 16.

    linear: the root mean square is divided by sqrt(fan-in). head_mean: added to the mean of the first hc entries, in sixteenths.
    shift: added to the exponent of every scale. fp4: the codes that the scales belong to are FP4, else FP8.
    """

    gain: int
    linear: bool = False
    mean: int = 0
    head_mean: int = 0
    shift: int = 0
    fp4: bool = False


WEIGHT, SCALED, PLAIN = (torch.bfloat16,), (torch.float8_e4m3fn, torch.float8_e8m0fnu), (torch.float32,)
PACKED = (torch.int8, torch.float8_e8m0fnu)

# (pattern of the name without its layer or stage and without .weight / .scale, dtypes, role); the first match counts
ROLES: tuple[tuple[str, tuple[torch.dtype, ...], Role], ...] = (
    (r"(.*[._])?norm[12]?", WEIGHT, Role(15, mean=16)),
    (r"embed|markov_head\.embed|image_(start|end|newline)", WEIGHT, Role(100)),
    (r"head", WEIGHT, Role(300, linear=True)),
    (r"attn\.attn_sink", PLAIN, Role(100)),
    (r"attn\.(wq_a|wkv|indexer\.wq_b)|main_proj", SCALED, Role(100, linear=True)),
    (r"attn\.wq_b", SCALED, Role(130, linear=True)),
    (r"attn\.wo_a", SCALED, Role(140, linear=True)),
    (r"attn\.wo_b", SCALED, Role(25, linear=True)),
    (r"attn\.(compressor\.wkv|indexer\.(wk|weights_proj))|confidence_head\.proj", WEIGHT, Role(100, linear=True)),
    (r"attn\.compressor\.wgate|markov_head\.head", WEIGHT, Role(150, linear=True)),
    (r"ffn\.gate", WEIGHT, Role(250, linear=True)),
    (r"ffn\.gate\.bias(_vl)?", PLAIN, Role(20)),
    (r"ffn\.shared_experts\.w[13]", SCALED, Role(120, linear=True)),
    (r"ffn\.shared_experts\.w2", SCALED, Role(25, linear=True)),
    (r"ffn\.experts\.\d+\.w[13]", PACKED, Role(120, linear=True, fp4=True)),
    (r"ffn\.experts\.\d+\.w2", PACKED, Role(25, linear=True, fp4=True)),
    (r"hc_(attn|ffn)_fn", PLAIN, Role(100, linear=True)),
    (r"hc_(attn|ffn)_base", PLAIN, Role(83, head_mean=-11)),
    (r"hc_(attn|ffn)_scale", PLAIN, Role(8, mean=12)),
    (r"engram\.embed", SCALED, Role(100)),
    (r"engram\.[qk]_weight", WEIGHT, Role(20, mean=16)),
    (r"engram\.wkv", SCALED, Role(60, linear=True)),
    (r"(aligner|vision)\..*bias", WEIGHT, Role(10)),
    (r"(aligner|vision)\..*", WEIGHT, Role(100, linear=True)),
)
WIDE = 8  # one routed expert in WIDE has large w1 and w3, so that the SwiGLU limit is reached at times


def role_of(name: str, dtype: torch.dtype, seed: int) -> Role:
    """The role of a released tensor name; ValueError where there is none or where it is not stored in `dtype`.

    Routed expert e is wide if e + key(seed, "....ffn.experts") is a multiple of 8: w1 and w3 four times larger, w2 four times smaller.
    """
    stem = re.sub(r"\.(weight|scale)$", "", name)
    local = re.sub(r"^(layers|mtp)\.\d+\.", "", stem)
    found = next(((dtypes, role) for pattern, dtypes, role in ROLES if re.fullmatch(pattern, local)), None)
    if found is None:
        raise ValueError(f"{name}: the weight recipe has no role for this name")
    dtypes, role = found
    is_scale = name.endswith(".scale")
    if dtype not in dtypes or is_scale != (dtype == torch.float8_e8m0fnu):
        stored = [str(d) for d in dtypes if (d == torch.float8_e8m0fnu) == is_scale]
        raise ValueError(f"{name}: dtype {dtype}; the recipe has {', '.join(stored) or 'no scale'} for this name")
    expert = re.fullmatch(r"(.*ffn\.experts)\.(\d+)\.(w[123])", stem)
    if expert and (int(expert[2]) + key(seed, expert[1])) % WIDE == 0:
        return replace(role, shift=-2 if expert[3] == "w2" else 2)
    return role
