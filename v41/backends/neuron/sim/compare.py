# SPDX-License-Identifier: Apache-2.0
"""Comparison of the instruction streams of the two programs of a kernel."""

from v41.backends.neuron.sim.context import CURRENT

MEETINGS = ("nisa.sendrecv", "nisa.core_barrier")


def _tree(log):
    """Nested form of a log: a dynamic loop becomes (op, [body])."""
    stack = [[]]
    for op, place in log:
        if op.endswith(" begin"):
            stack.append([])
        elif op.endswith(" end"):
            body = stack.pop()
            stack[-1].append((op[: -len(" end")], place, body))
        else:
            stack[-1].append((op, place, None))
    return stack[0]


def _moves(entry):
    return entry[2] is None and entry[0].startswith("nisa.dma_")


def first_difference(a, b):
    """The first entries that differ, or None; a loop that ran zero times on one program matches any body."""
    for x, y in zip(a, b, strict=False):
        if x[0] != y[0]:
            return x, y
        if x[2] and y[2]:
            inside = first_difference(x[2], y[2])
            if inside:
                return inside
    if len(a) != len(b):
        longer = a if len(a) > len(b) else b
        extra = longer[min(len(a), len(b))]
        return (extra, None) if longer is a else (None, extra)
    return None


def _without_moves(tree):
    return [(op, place, None if body is None else _without_moves(body)) for op, place, body in tree if not _moves((op, place, body))]


def _say(entry):
    return "nothing more" if entry is None else f"{entry[0]} at {entry[1]}" if entry[1] else entry[0]


def compare_programs(programs):
    """LNC-SEQUENCE when the streams differ beyond DMA, LNC-SEQUENCE-DMA when only DMAs differ."""
    a, b = (_tree(p.log) for p in programs)
    token = CURRENT.set(programs[0])
    try:
        hard = first_difference(_without_moves(a), _without_moves(b))
        if hard:
            detail = f"core 0 issues {_say(hard[0])}, core 1 {_say(hard[1])}"
            programs[0].report("LNC-SEQUENCE", detail, "kernel")
            return
        soft = first_difference(a, b)
        if soft:
            detail = f"core 0 issues {_say(soft[0])}, core 1 {_say(soft[1])}"
            programs[0].report("LNC-SEQUENCE-DMA", detail, "kernel")
    finally:
        CURRENT.reset(token)
