# SPDX-License-Identifier: Apache-2.0
"""Softmax pooling of token groups (docs/model.md 7.3)."""

import torch
from torch import Tensor

from v41.spec.types import Act, Wide


def softmax_pool(kv: Wide[Tensor, "b g ratio d"], score: Wide[Tensor, "b g ratio d"], dtype: torch.dtype) -> Act[Tensor, "b g d"]:
    """sum_i softmax_i(score) * kv over the tokens of a group, one softmax per channel, in fp32, rounded once."""
    return (kv * score.softmax(2)).sum(2).to(dtype)
