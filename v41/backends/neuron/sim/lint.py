# SPDX-License-Identifier: Apache-2.0
"""The Python subset of the tracer, checked on the source of a kernel and of every helper that it can reach."""

import ast
import inspect
import os
import textwrap
import types
from dataclasses import dataclass
from functools import lru_cache

from v41.backends.neuron.sim.errors import PACKAGE

LOOPS = ("fori_loop", "while_loop")
MUTATORS = ("append", "extend", "insert", "pop", "remove", "clear", "update", "add", "setdefault")


@dataclass(frozen=True)
class Finding:
    """One construct that the tracer refuses."""

    rule: str
    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Source:
    """A function's syntax tree and where it starts."""

    fn: types.FunctionType
    tree: ast.FunctionDef
    file: str
    first: int
    helper: bool


@lru_cache(maxsize=256)
def lint(fn):
    """Findings in fn and its reachable helpers, in order of discovery."""
    seen, queue, findings = set(), [(fn, False)], []
    while queue:
        current, helper = queue.pop(0)
        current = inspect.unwrap(current)
        code = current.__code__
        if code in seen:
            continue
        seen.add(code)
        source = _source(current, helper)
        if source is None:
            findings.append(Finding("PY-SOURCE", code.co_filename, code.co_firstlineno, f"no def of {current.__name__} found"))
            continue
        findings += _check(source)
        queue += [(f, True) for f in _callees(source)]
    return tuple(findings)


def _source(fn, helper):
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    return Source(fn, tree, fn.__code__.co_filename, first, helper)


def _resolve(fn, node):
    """The object that a Name or Attribute of module globals denotes, or None."""
    if isinstance(node, ast.Name):
        return fn.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(fn, node.value)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    return None


def _callees(source):
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        # A function that is passed on (a loop body) is traced as well.
        for name in (node.func, *node.args, *(k.value for k in node.keywords)):
            target = _resolve(source.fn, name)
            target = getattr(target, "fn", target)
            members = vars(target).values() if isinstance(target, type) else (target,)
            for fn in members:
                if isinstance(fn, types.FunctionType) and _ours(fn):
                    yield fn


def _ours(fn):
    file = inspect.unwrap(fn).__code__.co_filename
    # Methods that dataclasses and enums generate have no file.
    return os.path.exists(file) and not file.startswith(PACKAGE) and not file.startswith(inspect.__file__.rsplit("/", 1)[0])


def _check(source):
    bodies = _loop_bodies(source.tree)
    found = [*_parameters(source), *_closures(source, bodies)]
    for node in ast.walk(source.tree):
        for rule, text in _node(source, node):
            found.append((rule, node, text))
    for body in bodies:
        found += [("PY-BODY", node, text) for node, text in _state(source, body)]
    return [Finding(rule, source.file, source.first + node.lineno - 1, text) for rule, node, text in found]


def _state(source, body):
    """Calls in a dynamic loop body that change a Python object of the kernel."""
    for node in ast.walk(body):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in MUTATORS:
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id not in source.fn.__globals__:
            yield node, f"{owner.id}.{node.func.attr}() in a dynamic loop body"


def _loop_bodies(tree):
    """Nested functions that are passed to fori_loop or while_loop."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOOPS:
            names |= {a.id for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Name)}
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not tree and n.name in names]


def _parameters(source):
    tree, args = source.tree, source.tree.args
    if args.kwonlyargs or args.vararg or args.kwarg:
        yield "PY-PARAMS", tree, f"{tree.name}: keyword-only or variadic parameters"
    if source.helper and args.defaults:
        yield "PY-PARAMS", tree, f"helper {tree.name} has default values, which are dropped"


def _closures(source, bodies):
    if source.fn.__closure__ and source.fn.__code__.co_freevars != ("__class__",):
        yield "PY-CLOSURE", source.tree, f"{source.tree.name} closes over {', '.join(source.fn.__code__.co_freevars)}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node is not source.tree and node not in bodies:
            yield "PY-CLOSURE", node, f"nested function {node.name} that is no dynamic loop body"


def _node(source, node):
    kind = type(node)
    simple = SIMPLE.get(kind)
    if simple:
        yield simple
    if kind is ast.With and not all(_is_no_reorder(i.context_expr) for i in node.items):
        yield "PY-WITH", "with"
    if kind is ast.Compare and any(isinstance(o, (ast.Is, ast.IsNot)) for o in node.ops):
        yield "PY-IS", "is / is not"
    if kind is ast.For and not isinstance(node.target, ast.Name):
        yield "PY-TARGET", f"for {ast.unparse(node.target)}"
    if kind in (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp) and source.helper:
        yield "PY-COMPREHENSION", "comprehension in a helper"
    if kind is ast.Call:
        yield from _call(source, node)


def _is_no_reorder(expression):
    return isinstance(expression, ast.Call) and getattr(expression.func, "attr", "") == "no_reorder"


def _call(source, node):
    if isinstance(node.func, ast.Name) and node.func.id in ("zip", "enumerate"):
        yield "PY-ITER", f"{node.func.id}()"
    if any(k.arg is None for k in node.keywords):
        yield "PY-STAR", "** in a call"
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        value = owner.value if isinstance(owner, ast.Constant) else _resolve(source.fn, owner)
        if isinstance(value, (int, float, str, tuple)) and not isinstance(owner, ast.JoinedStr):
            yield "PY-METHOD", f"{ast.unparse(node.func)}() on a constant"


SIMPLE = {
    ast.Raise: ("PY-RAISE", "raise"),
    ast.Try: ("PY-TRY", "try"),
    ast.Global: ("PY-GLOBAL", "global"),
    ast.Nonlocal: ("PY-GLOBAL", "nonlocal"),
    ast.Lambda: ("PY-LAMBDA", "lambda"),
    ast.Starred: ("PY-STAR", "starred expansion"),
    ast.While: ("PY-WHILE", "while"),
    ast.Yield: ("PY-WHILE", "yield"),
    ast.YieldFrom: ("PY-WHILE", "yield from"),
    ast.Await: ("PY-WHILE", "await"),
    ast.Match: ("PY-WHILE", "match"),
}
