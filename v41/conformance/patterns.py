# SPDX-License-Identifier: Apache-2.0
"""Which cases run and which may fail: patterns of names, each of which must match something."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

KEYS = ("include", "exclude", "xfail", "lacks")


@dataclass(frozen=True)
class Patterns:
    """Shell patterns over case names (`primitive/gate.*/faithful`). xfail and lacks map a pattern or a capability to its reason."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    xfail: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def runs(self, name: str) -> bool:
        """Whether a case is included and not excluded."""
        return (not self.include or any_of(name, self.include)) and not any_of(name, self.exclude)

    def expected_to_fail(self, name: str) -> str | None:
        """The reason of the first xfail pattern that matches."""
        return next((why for p, why in self.xfail.items() if fnmatchcase(name, p)), None)

    def idle(self, names: Iterable[str]) -> list[str]:
        """Entries that match no case: each of them fails a run."""
        known = list(names)
        entries = [("include", p) for p in self.include] + [("exclude", p) for p in self.exclude] + [("xfail", p) for p in self.xfail]
        return [f"{kind} {p!r}" for kind, p in entries if not any(fnmatchcase(n, p) for n in known)]


def any_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def read_patterns(file: Path) -> Patterns:
    """From a TOML file: lists include and exclude, tables xfail and lacks. ValueError with file and key for anything else."""
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: not TOML: {e}") from e
    for key, value in told.items():
        if key not in KEYS:
            raise ValueError(f"{file}: {key} is not one of {', '.join(KEYS)}")
        wanted = list if key in ("include", "exclude") else dict
        items = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        if not isinstance(value, wanted) or not all(isinstance(i, str) and i.strip() for i in items):
            raise ValueError(f"{file}: {key} is no {'list of patterns' if wanted is list else 'table of reasons'}")
    return Patterns(tuple(told.get("include", ())), tuple(told.get("exclude", ())), told.get("xfail", {}), told.get("lacks", {}))
