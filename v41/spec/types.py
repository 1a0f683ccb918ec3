# SPDX-License-Identifier: Apache-2.0
"""Dtype names for shape annotations, beyond those that jaxtyping has.

`Act` is an activation: bfloat16 in `faithful`, `released` and `trn2`, float32 or float64 in `exact`. `Wide` is what sums run in:
float32, or float64 in `exact` float64.
"""

from typing import TYPE_CHECKING

from jaxtyping import AbstractDtype

if TYPE_CHECKING:  # a static checker sees plain tensors
    from typing import Annotated as Act
    from typing import Annotated as BF16
    from typing import Annotated as E4M3
    from typing import Annotated as E8M0
    from typing import Annotated as F32
    from typing import Annotated as Flag
    from typing import Annotated as I8
    from typing import Annotated as I32
    from typing import Annotated as I64
    from typing import Annotated as Ids
    from typing import Annotated as Wide
else:

    class Act(AbstractDtype):
        dtypes = ["bfloat16", "float32", "float64"]

    class Wide(AbstractDtype):
        dtypes = ["float32", "float64"]

    class BF16(AbstractDtype):
        dtypes = ["bfloat16"]

    class F32(AbstractDtype):
        dtypes = ["float32"]

    class E4M3(AbstractDtype):
        """8-bit floats, OCP e4m3fn: maximum 448, no infinity."""

        dtypes = ["float8_e4m3fn"]

    class E8M0(AbstractDtype):
        """Power-of-two scales: byte b is 2^(b - 127), 255 is NaN."""

        dtypes = ["float8_e8m0fnu"]

    class I8(AbstractDtype):
        """Two e2m1 codes a byte, the even column in the low nibble."""

        dtypes = ["int8"]

    class I32(AbstractDtype):
        dtypes = ["int32"]

    class I64(AbstractDtype):
        dtypes = ["int64"]

    class Ids(AbstractDtype):
        """Token, row or expert ids: int64 on the way in, int32 inside."""

        dtypes = ["int32", "int64"]

    class Flag(AbstractDtype):
        dtypes = ["bool"]
