# SPDX-License-Identifier: Apache-2.0
"""Functions that break the Python subset, one each; never run, only linted. LEGAL holds what must pass."""

import math

from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

N = 128
PAIRS = ((1, 2), (3, 4))


def raises(x):
    if x.ndim != 2:
        raise ValueError("rank")


def tries(x):
    try:
        nl.load(x)
    finally:
        pass


def withs(x):
    with open(x):
        pass


def compares(x, y=None):
    if y is None:
        nl.load(x)


def compares_not(x, y=None):
    if y is not None:
        nl.load(x)


def tuple_target(x):
    for a, b in PAIRS:
        nl.load(x[a:b])


def zips(x):
    for _i in zip(range(2), range(2), strict=True):
        nl.load(x)


def enumerates(x):
    for _i in enumerate(PAIRS):
        nl.load(x)


def starred(x):
    nl.load(*PAIRS)


def double_starred(x):
    nl.load(**{})


def comprehension_helper(x):
    return [nl.load(x) for i in range(2)]


def calls_comprehension_helper(x):
    comprehension_helper(x)


def keyword_only(x, *, n):
    nl.load(x)


def default_helper(x, n=3):
    nl.load(x[0:n])


def calls_default_helper(x):
    default_helper(x)


def uses_global(x):
    global N
    N = 3


def lambdas(x):
    f = lambda v: nl.load(v)  # noqa: E731
    f(x)


def make_closure(k):
    def inner(x):
        nl.load(x[0:k])

    return inner


closure = make_closure(4)


def nested_helper(x):
    def helper(y):
        nl.load(y)

    helper(x)


def method_of_constant(x):
    nl.load(x[0 : N.bit_length()])


def method_of_literal(x):
    "abc".upper()


def whiles(x):
    while x:
        nl.load(x)


def yields(x):
    yield x


def body_state(x):
    seen = []

    def body(i):
        seen.append(i)

    nl.fori_loop(0, 3, body)


def deep_helper(x):
    raise RuntimeError


def middle_helper(x):
    deep_helper(x)


def reaches_deep(x):
    middle_helper(x)


def loop_body(i):
    raise RuntimeError


def passes_a_body(x):
    nl.fori_loop(0, 3, loop_body)


class Holder(nl.NKIObject):
    def __init__(self, n):
        self.n = n

    def size(self):
        return None if self.n is None else self.n


def uses_a_class(x):
    nl.load(x[0 : Holder(4).size()])


unreadable = eval("lambda x: None")


BROKEN = {
    unreadable: "PY-SOURCE",
    passes_a_body: "PY-RAISE",
    uses_a_class: "PY-IS",
    raises: "PY-RAISE",
    tries: "PY-TRY",
    withs: "PY-WITH",
    compares: "PY-IS",
    compares_not: "PY-IS",
    tuple_target: "PY-TARGET",
    zips: "PY-ITER",
    enumerates: "PY-ITER",
    starred: "PY-STAR",
    double_starred: "PY-STAR",
    calls_comprehension_helper: "PY-COMPREHENSION",
    keyword_only: "PY-PARAMS",
    calls_default_helper: "PY-PARAMS",
    uses_global: "PY-GLOBAL",
    lambdas: "PY-LAMBDA",
    closure: "PY-CLOSURE",
    nested_helper: "PY-CLOSURE",
    method_of_constant: "PY-METHOD",
    method_of_literal: "PY-METHOD",
    whiles: "PY-WHILE",
    yields: "PY-WHILE",
    body_state: "PY-BODY",
    reaches_deep: "PY-RAISE",
}


def clean_helper(x, n):
    assert n > 0, f"n is {n}"
    return nl.load(x[0:n])


def legal(x, n=4, flag=True):
    tiles = []
    for _i in range(0, n, 2):
        t = clean_helper(x, n)
        tiles.append(t)
    a, b = tiles[0], tiles[1]
    sizes = [i * 2 for i in range(n)]
    if flag and n > 2:
        with nl.no_reorder():
            nisa.tensor_tensor(a, a, b, nl.add)

    def body(i):
        nisa.tensor_tensor(a, a, b, nl.add)

    nl.fori_loop(0, min(n, math.ceil(sizes[0])), body)
    return a


LEGAL = (legal,)
