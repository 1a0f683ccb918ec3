# SPDX-License-Identifier: Apache-2.0
"""What `v41 bench cpu` measures (docs/performance.md 1)."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.backends.cpu import backend as cpu
from v41.backends.cpu.blocks import backend as blocks
from v41.golden import folder
from v41.spec.backend import Backend
from v41.spec.params import Params
from v41.tree import leaves

READ = 1 << 28  # bytes of the bandwidth measurement, far beyond any cache
SQUARE = 1024  # rows and columns of the GEMM measurement
SHORT = 64  # context of a decode step where no prefill is that short


@dataclass(frozen=True)
class Bench:
    """params for the CPU backend, stored bytes for the baseline and the spec, rows of the prefills, thread counts, runs of each."""

    params: Params
    stored: Params
    rows: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int


Run = Callable[[Params, Backend], tuple[Tensor, ...]]  # what a work gives: logits and tokens


def works(bench: Bench) -> dict[str, Run]:
    """Each work on a context that the CPU backend made, which is the spec's bit for bit."""
    config, rows = bench.params.config, bench.rows
    tokens = torch.randint(3, config.vocab_size, (1, max(rows) + 2), generator=torch.Generator().manual_seed(0))
    tokens = tokens.where(tokens != (config.image_token_id or -1), 3)
    context, capacity = min(rows), max(rows) + 2
    empty = api.init_cache(bench.params, 1, capacity)
    out, held = api.step(bench.params, empty, tokens[:, :context], ops=cpu)
    if held.draft:
        _, held = api.draft(bench.params, held, out.hidden, None, ops=cpu)
    last = tokens[:, context : context + 1]

    def step(rows: int) -> Run:
        return lambda p, ops: (api.step(p, empty, tokens[:, :rows], logits="last", ops=ops)[0].logits,)

    found: dict[str, Run] = {"decode": lambda p, ops: (api.step(p, held, last, ops=ops)[0].logits,)}
    found |= {f"prefill_{n}": step(n) for n in rows}
    if held.draft:
        after, grown = api.step(bench.params, held, last, ops=cpu)

        def draft(p: Params, ops: Backend) -> tuple[Tensor, ...]:
            made, _ = api.draft(p, grown, after.hidden, tokens[:, context + 1], ops=ops)
            return made.logits, made.tokens

        found["draft"] = draft
    return found


def timed(run: Callable[[], Any], threads: int) -> float:
    """Seconds of one run."""
    torch.set_num_threads(threads)
    start = perf_counter()
    run()
    return perf_counter() - start


def best_threads(run: Callable[[], Any], threads: tuple[int, ...]) -> int:
    """The thread count of the fastest of two runs of each."""
    if len(threads) == 1:
        return threads[0]
    return min(threads, key=lambda n: min(timed(run, n) for _ in range(2)))


def machine(threads: tuple[int, ...]) -> dict[str, float]:
    """Bytes that can be read and multiplications and additions that a product can do, a second: the best of all thread counts."""
    data, square = torch.zeros(READ // 8, dtype=torch.int64), torch.ones(SQUARE, SQUARE)
    read = min(timed(data.sum, n) for n in threads for _ in range(3))
    product = min(timed(lambda: square @ square, n) for n in threads for _ in range(5))
    return {"bytes_per_second": READ / read, "flops_per_second": 2 * SQUARE**3 / product}


def run_bench(bench: Bench) -> dict[str, Any]:
    """The figures, as `--json` prints them. The thread count is put back."""
    before = torch.get_num_threads()
    try:
        limits = machine(bench.threads)
        told = {name: measure(run, bench, limits) for name, run in works(bench).items()}
    finally:
        torch.set_num_threads(before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = sum(t.nbytes for t in leaves(bench.params))
    return told | {"machine": limits, "held_bytes": held, "peak_rss": peak, "rounds": bench.rounds, "versions": folder.versions()}


def measure(run: Run, bench: Bench, limits: dict[str, float]) -> dict[str, Any]:
    """One work: both sides in turns, the bits of the spec, the weights touched and what they cost at least."""

    def ours() -> Any:
        return run(bench.params, cpu)

    def baseline() -> Any:
        return run(bench.stored, blocks)

    mine, theirs = best_threads(ours, bench.threads), best_threads(baseline, bench.threads)
    pairs = [(timed(ours, mine), timed(baseline, theirs)) for _ in range(bench.rounds)]
    seconds, slow = (median(times) for times in zip(*pairs, strict=True))
    touched = touch(run, bench.params)
    equal = all(torch.equal(a, b) for a, b in zip(ours(), run(bench.stored, Backend("spec")), strict=True))
    least = max(touched["weight_bytes"] / limits["bytes_per_second"], touched["flops"] / limits["flops_per_second"])
    return {
        "seconds": seconds,
        "baseline_seconds": slow,
        "ratio": slow / seconds,
        "limit_seconds": least,
        "threads": mine,
        "baseline_threads": theirs,
        "equal": equal,
        **touched,
    }


def touch(run: Run, params: Params) -> dict[str, int]:
    """Bytes of weights that one run reads at least, each once a call, and the multiplications and additions of its products with them."""
    ops, count = counting(cpu)
    run(params, ops)
    return dict(count)


def counting(ops: Backend) -> tuple[Backend, dict[str, int]]:
    """`ops`, and the counts that it adds to: weights of products, gathered rows of tables."""
    count = {"weight_bytes": 0, "flops": 0}

    def add(rows: int, *weights: Any, share: float = 1) -> None:
        for w in weights:
            tensors = leaves(w)
            codes = tensors[0].numel() * (2 if tensors[0].dtype == torch.int8 else 1)
            count["weight_bytes"] += round(share * sum(t.nbytes for t in tensors))
            count["flops"] += round(share * 2 * rows * codes)

    def product(body: Callable) -> Callable:
        def counted(x: Tensor, w: Any, *rest: Any) -> Tensor:
            heads = rest[0] if len(rest) > 1 else 1  # each group of the grouped product sees its own part of x
            add(prod(x.shape[:2]) if heads > 1 else prod(x.shape[:-1]), w)
            return body(x, w, *rest)

        return counted

    def shared_expert(x: Tensor, w1: Any, w2: Any, w3: Any, **rest: Any) -> Tensor:
        add(x.shape[0], w1, w2, w3)
        return ops.shared_expert(x, w1, w2, w3, **rest)

    def experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Any, w2: Any, w3: Any, **rest: Any) -> Tensor:
        held = leaves(w1)[0].shape[0]
        chosen = ids.unique().numel()
        add(0, w1, w2, w3, share=chosen / held)
        count["flops"] += sum(2 * ids.numel() * t.numel() * (2 if t.dtype == torch.int8 else 1) // held for t in (leaves(w)[0] for w in (w1, w2, w3)))
        return ops.experts(x, weights, ids, w1, w2, w3, **rest)

    def mixes(stream: Tensor, fn: Tensor, *rest: Any, **named: Any) -> Any:
        add(prod(stream.shape[:2]), fn)
        return ops.hc_mixes(stream, fn, *rest, **named)

    def gate(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        add(x.shape[0], weight)
        return ops.gate(x, weight, *rest, **named)

    plain = {n: product(getattr(ops, n)) for n in ("linear", "partial_linear", "plain_linear", "wide_linear", "grouped_linear")}
    return replace(ops, name="counting", **plain, shared_expert=shared_expert, experts=experts, hc_mixes=mixes, gate=gate), count
