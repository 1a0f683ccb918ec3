# SPDX-License-Identifier: Apache-2.0
"""What a mutant is, and the ways to make one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from v41.spec.backend import Backend
from v41.spec.params import Params

Change = Callable[[Params, Backend], AbstractContextManager[tuple[Params, Backend]]]


@dataclass(frozen=True)
class Mutant:
    """A wrong model as data: what is wrong, the section of docs/model.md that it breaks, the check that is run, and the first tensor
    that must differ there."""

    name: str
    section: str
    check: str
    first: str
    change: Change


class Outcome(NamedTuple):
    """The first tensor that differs (None: the mutant survived) and its relative L2 error (infinite for choices and shapes)."""

    first: str | None
    error: float


def swap(**bodies: Callable[[Params], Callable] | Callable) -> Change:
    """Other primitives. Each body is a function of the primitive's own arguments."""

    @contextmanager
    def change(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
        yield params, replace(ops, **bodies)  # type: ignore[arg-type]

    return change


def patch(*places: tuple[Any, str, Any]) -> Change:
    """Other module attributes, for the time of the check: (module, name, value)."""

    @contextmanager
    def change(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
        before = [getattr(module, name) for module, name, _ in places]
        try:
            for module, name, value in places:
                setattr(module, name, value)
            yield params, ops
        finally:
            for (module, name, _), value in zip(places, before, strict=True):
                setattr(module, name, value)

    return change


def configured(**fields: Any) -> Change:
    """Other config fields, with the same parameters."""

    @contextmanager
    def change(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
        yield replace(params, config=replace(params.config, **fields)), ops

    return change


def loaded(edit: Callable[[Params], Params]) -> Change:
    """Other parameters."""

    @contextmanager
    def change(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
        yield edit(params), ops

    return change


@contextmanager
def nothing(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
    """No change: the baseline that every check must pass."""
    yield params, ops
