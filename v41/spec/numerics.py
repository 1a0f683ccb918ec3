# SPDX-License-Identifier: Apache-2.0
"""How the model is computed, as a value (docs/numerics.md 1). What the model is, is `Config`."""

from dataclasses import dataclass

import torch

REGIMES = ("faithful", "released", "exact", "trn2")
E4M3_MAX, E4M3_MAX_TRN2 = 448.0, 240.0  # Trainium2 has the e4m3 with infinities
INDEX_KEYS = ("owner", "reference")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Numerics:
    """Regime, index keys and activation dtype.

    regime      `faithful` (bfloat16 with the reference's roundings, ties to the lower index, fixed slot lists), `released` (the
                same with the accidents of the released code), `exact` (no rounding of activations and caches) or `trn2` (`faithful` with
                the values that Trainium2 forces, docs/numerics.md 6)
    index_keys  `owner` or `reference`; None takes the regime's own: `reference` in `released`, else `owner`
    dtype       "float32" (default) or "float64" in `exact`; "bfloat16" in the others

    Raises ValueError for a combination that does not exist.
    """

    regime: str = "faithful"
    index_keys: str | None = None
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"numerics: regime {self.regime!r} is not one of {REGIMES}")
        keys = self.index_keys or ("reference" if self.regime == "released" else "owner")
        if keys not in INDEX_KEYS:
            raise ValueError(f"numerics: index_keys {keys!r} is not one of {INDEX_KEYS}")
        name = str(self.dtype).removeprefix("torch.") if self.dtype else ("float32" if self.regime == "exact" else "bfloat16")
        allowed = ("float32", "float64") if self.regime == "exact" else ("bfloat16",)
        if name not in allowed:
            raise ValueError(f"numerics: dtype {name!r} in regime {self.regime!r}; it takes {allowed}")
        object.__setattr__(self, "index_keys", keys)
        object.__setattr__(self, "dtype", name)

    @property
    def act(self) -> torch.dtype:
        """The dtype of activations and caches."""
        return DTYPES[str(self.dtype)]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums, of the stream mixes, of the router and of logits."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def rounds(self) -> bool:
        """Whether activations and caches take their fp8 and fp4 round trips."""
        return self.regime != "exact"

    @property
    def device(self) -> bool:
        """Whether values are those that Trainium2 forces."""
        return self.regime == "trn2"

    @property
    def e4m3_max(self) -> float:
        """The largest magnitude of an fp8 activation and of an fp8 scale of compressed rows."""
        return E4M3_MAX_TRN2 if self.device else E4M3_MAX

    @property
    def compact(self) -> bool:
        """Whether slot lists are the release's compact ones: shapes then follow the position."""
        return self.regime == "released"

    @property
    def needs_start(self) -> bool:
        """Whether a call needs its first position as a Python number (and so equal lengths)."""
        return self.compact or self.index_keys == "reference"

    def describe(self) -> dict[str, str]:
        """For manifests: every field as text."""
        return {"regime": self.regime, "index_keys": str(self.index_keys), "dtype": str(self.dtype)}
