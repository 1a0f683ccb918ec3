# SPDX-License-Identifier: Apache-2.0
"""Only the index keys that exist are scored."""

from torch import Tensor

from v41.spec.types import I32, Act

STEP = 64  # a product with very few columns takes another path in the BLAS, with other last bits


def seen_rows(keys: Act[Tensor, "b t index_dim"], visible: I32[Tensor, "b s"]) -> Act[Tensor, "b n index_dim"]:
    """The leading key rows up to the last one that a query of the batch sees, rounded up; the others score -inf anyway."""
    return keys[:, : max(-(-int(visible.max()) // STEP), 1) * STEP]
