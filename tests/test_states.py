# SPDX-License-Identifier: Apache-2.0
"""A result depends on the positions and nothing else: not on the split into calls, the batch partner, padding, rewinds or restores."""

from functools import cache as memo
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import v41
from tests.states import poison, same_cache

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"
LONGEST, CAPACITY, SEQUENCES = 104, 112, 5
# exact float32 keeps its bits by the same means as faithful. exact float64: sums of up to 1024 terms at relative error 1024 * 2^-53,
# grown by the depth; flips of a choice would show as 1e-2.
BOUND = {"faithful": 0.0, "exact float32": 0.0, "exact float64": 1e-10}


@memo
def params(numerics: str) -> v41.Params:
    regime, _, dtype = numerics.partition(" ")
    return v41.load_params(TINY, numerics=v41.Numerics(regime, dtype=dtype or None))


@memo
def tokens() -> torch.Tensor:
    drawn = torch.randint(0, 505, (SEQUENCES, LONGEST), generator=torch.Generator().manual_seed(5))
    drawn[1] = drawn[0]  # two sequences with one beginning, for forks
    drawn[1, 40:] = (drawn[1, 40:] + 7) % 505
    drawn[2] = 42  # a constant sequence: every n-gram and every key repeats, so scores tie
    return drawn


@memo
def one_shot(numerics: str, sequence: int, length: int = LONGEST) -> tuple[torch.Tensor, v41.Cache]:
    """(logits of all rows, cache) of one sequence in one call, its draft rings filled."""
    p = params(numerics)
    out, cache = v41.step(p, v41.init_cache(p, 1, CAPACITY), tokens()[sequence : sequence + 1, :length])
    return out.logits[0], v41.draft(p, cache, out.hidden, None)[1]


def close(numerics: str):
    """Equality of two tensors: bit for bit where the bound is 0."""
    bound = BOUND[numerics]

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        if not bound or not a.is_floating_point():
            return torch.equal(a, b)
        return a.shape == b.shape and bool((a - b).double().norm() <= bound * b.double().norm().clamp_min(1e-300))

    return equal


class Run:
    """A batch that is stepped, rewound, permuted and restored, with what each of its sequences is."""

    def __init__(self, numerics: str, sequences: list[int]):
        self.numerics, self.params, self.equal = numerics, params(numerics), close(numerics)
        self.sequences = sequences
        self.cache = v41.init_cache(self.params, len(sequences), CAPACITY)

    def step(self, wanted: list[int], padding: int, seed: int) -> None:
        """Up to `wanted` more rows of each sequence, `padding` columns of garbage behind the longest."""
        lengths = self.cache.length.tolist()
        valid = [min(w, LONGEST - n) for w, n in zip(wanted, lengths, strict=True)]
        rows = max(max(valid) + padding, 1)
        fed = torch.randint(-(2**31), 2**31, (len(valid), rows), generator=torch.Generator().manual_seed(seed))
        for b, (n, v) in enumerate(zip(lengths, valid, strict=True)):
            fed[b, :v] = tokens()[self.sequences[b], n : n + v]
        out, self.cache = v41.step(self.params, self.cache, fed, valid=valid)
        _, self.cache = v41.draft(self.params, self.cache, out.hidden, None, valid=valid)
        for b, (n, v) in enumerate(zip(lengths, valid, strict=True)):
            assert self.equal(out.logits[b, :v], one_shot(self.numerics, self.sequences[b])[0][n : n + v]), (b, n, v)
            assert not out.logits[b, v:].any()

    def rewind(self, back: list[int]) -> None:
        floor = self.cache.high - self.cache.slack
        length = torch.maximum(self.cache.length - torch.tensor(back[: self.cache.batch]), floor.clamp_min(0))
        self.cache = v41.rewind(self.cache, torch.minimum(length, self.cache.length).int())

    def take(self, index: list[int]) -> None:
        self.cache, self.sequences = v41.take(self.cache, index), [self.sequences[i] for i in index]

    def restore(self, folder: Path) -> None:
        v41.save_cache(self.params, self.cache, folder)
        self.cache = v41.load_cache(self.params, folder)

    def finish(self) -> None:
        """Every live row of every cache is that of the one-shot run of the same length."""
        for b, (sequence, length) in enumerate(zip(self.sequences, self.cache.length.tolist(), strict=True)):
            if length:
                same_cache(self.params, self.cache, one_shot(self.numerics, sequence, length)[1], b, self.equal)


EDGES = [0, 1, 1, 1, 2, 3, 5, 8, 13, 31, 32, 33, 40, 67]
actions = st.one_of(
    st.tuples(st.just("step"), st.lists(st.sampled_from(EDGES), min_size=4, max_size=4), st.sampled_from([0, 0, 1, 5]), st.integers(0, 99)),
    st.tuples(st.just("rewind"), st.lists(st.integers(0, 8), min_size=4, max_size=4)),
    st.tuples(st.just("poison")),
    st.tuples(st.just("restore")),
    st.tuples(st.just("take"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
)


def play(numerics: str, sequences: list[int], schedule: list[tuple], folder: Path) -> None:
    run = Run(numerics, sequences)
    for action, *arguments in schedule:
        if action == "step":
            run.step(arguments[0][: len(run.sequences)], *arguments[1:])
        elif action == "rewind":
            run.rewind(*arguments)
        elif action == "take":
            run.take([i % len(run.sequences) for i in arguments[0]])
        elif action == "restore":
            run.restore(folder)
        else:
            run.cache = poison(run.cache)
    run.finish()


batches = st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=4)
quick = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("numerics", BOUND)
@settings(max_examples=5, **quick)
@given(sequences=batches, schedule=st.lists(actions, min_size=4, max_size=7))
def test_a_schedule_of_calls_equals_one_call(numerics: str, sequences: list[int], schedule: list[tuple], tmp_path_factory: pytest.TempPathFactory) -> None:
    play(numerics, sequences, schedule, tmp_path_factory.getbasetemp() / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("numerics", BOUND)
@settings(max_examples=200, **quick)
@given(sequences=batches, schedule=st.lists(actions, min_size=3, max_size=14))
def test_a_wide_sweep_of_schedules_equals_one_call(
    numerics: str, sequences: list[int], schedule: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    play(numerics, sequences, schedule, tmp_path_factory.getbasetemp() / "cache")
