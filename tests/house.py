# SPDX-License-Identifier: Apache-2.0
"""The house rules as functions: each takes a parsed file or a text and gives what it finds wrong, with the line."""

import ast
import re
from collections.abc import Iterator

FILE_LINES, FUNCTION_LINES = 300, 40
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
SPEC = "v41.spec"
SHARDED = ("config", "plan", "params", "cache", "table", "numerics", "types")
# Who may import what of v41; the longest matching prefix of a module's name decides. A name allows itself and all below it.
IMPORTS = {
    "v41.spec": ("v41.spec", "v41.tree"),
    "v41.tree": (),
    "v41.sharding": ("v41.sharding", "v41.tree", *(f"v41.spec.{m}" for m in SHARDED)),
    "v41.checkpoint": ("v41.checkpoint",),
    "v41.recipe": ("v41.recipe", "v41.recipe_roles", "v41.recipe_words"),
    "v41.recipe_roles": ("v41.recipe_words",),
    "v41.recipe_words": (),
    "v41.tokenizer": (),
    "v41.backends": ("v41.backends", "v41.sharding", "v41.spec", "v41.tree"),
    "v41.backends.neuron.sim": ("v41.backends.neuron.sim",),
    "v41.api": ("v41.api", "v41.backends", "v41.checks", "v41.spec", "v41.tree"),
    "v41.checks": ("v41.spec",),
}
# What the spec may import from elsewhere, beside the standard library.
SPEC_OUTSIDE = {"torch", "einops", "jaxtyping"}
HOST_READS = {"item", "tolist", "numpy", "cpu"}
# Written in two parts, so that this file does not hold them.
PLACES = ["/wo" + "rk/", "/tm" + "p/", "/ro" + "ot/", "/ho" + "me/", "fac" + "ts/", ".." + "/shared"]
HOSTS = ["py" + "pi.org", "python" + "hosted", "down" + "load.pytorch"]
WORDS = PLACES + HOSTS


def imports(tree: ast.Module, module: str, package: bool) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import; `from a import b` counts as a.b where b might be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: len(module.split(".")) - node.level + package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((f"{base}.{a.name}", node.lineno) for a in node.names)


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_imports(tree: ast.Module, module: str, package: bool, standard: frozenset[str]) -> list[str]:
    """Imports that the direction of the parts forbids."""
    rules = [p for p in IMPORTS if inside(module, p)]
    if not rules:
        return []
    allowed, found = IMPORTS[max(rules, key=len)], []
    for name, line in imports(tree, module, package):
        top = name.split(".")[0]
        if top == "v41" and not any(inside(name, p) or p.startswith(name + ".") for p in allowed):
            found.append(f"{line}: {module} imports {name}")
        if inside(module, SPEC) and top != "v41" and top not in SPEC_OUTSIDE and top not in standard:
            found.append(f"{line}: {module} imports {name}")
    return found


def no_licence(text: str) -> list[str]:
    return [] if text.split("\n", 1)[0] == LICENCE else ["1: no licence line"]


def too_long(text: str) -> list[str]:
    lines = text.count("\n")
    return [f"{lines} lines, above {FILE_LINES}"] if lines > FILE_LINES else []


def long_functions(tree: ast.Module) -> list[str]:
    """Functions whose body, without the docstring, has more than 40 lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            if lines > FUNCTION_LINES:
                found.append(f"{node.lineno}: {node.name} has {lines} lines, above {FUNCTION_LINES}")
    return found


def own_names(scope: ast.AST) -> set[str]:
    """Names that a scope binds to a list or a dict that it makes itself."""
    makers = (ast.List, ast.Dict, ast.ListComp, ast.DictComp)
    names = set()
    for node in ast.walk(scope):
        value = getattr(node, "value", None)
        called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None
        if (isinstance(value, makers) or called in ("list", "dict")) and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def mutations(tree: ast.Module) -> list[str]:
    """In-place methods, augmented assignments, item and attribute assignments to what a function did not make, and `global`."""
    found = []
    makes_tensors = any(isinstance(n, ast.Import) and any(a.name == "torch" for a in n.names) for n in ast.walk(tree))
    for scope in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Module)):
        mine = own_names(scope) if isinstance(scope, ast.FunctionDef) else set()
        for node in own_nodes(scope):
            if isinstance(node, ast.Global | ast.Nonlocal):
                found.append(f"{node.lineno}: {type(node).__name__.lower()} {', '.join(node.names)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and re.fullmatch(r"[a-z]\w*[a-z0-9]_", node.func.attr):
                found.append(f"{node.lineno}: in-place .{node.func.attr}()")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and any(k.arg == "out" for k in node.keywords):
                found.append(f"{node.lineno}: out=")
            if makes_tensors and isinstance(node, ast.AugAssign):
                found.append(f"{node.lineno}: augmented assignment")
            for target in stored(node):
                base = target.value.id if isinstance(target.value, ast.Name) else None
                if makes_tensors and base not in mine:
                    found.append(f"{node.lineno}: assignment into {ast.unparse(target)}")
    return found


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def stored(node: ast.AST) -> list[ast.Subscript | ast.Attribute]:
    """Items and attributes that a statement assigns to."""
    targets = getattr(node, "targets", []) + ([node.target] if isinstance(node, ast.AnnAssign | ast.For) else [])
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
    return [t for t in flat if isinstance(t, ast.Subscript | ast.Attribute)]


def host_reads(tree: ast.Module) -> list[str]:
    """Reads of tensor values and of the environment."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOST_READS and not node.args:
            found.append(f"{node.lineno}: .{node.func.attr}()")
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def undocumented(tree: ast.Module, names: set[str]) -> list[str]:
    """Of the named top-level functions and classes, and of the public methods of those classes, the ones without a docstring."""
    found = [] if ast.get_docstring(tree) or not tree.body else ["1: the module has no docstring"]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in names:
            continue
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
        members = [node, *(methods if isinstance(node, ast.ClassDef) else [])]
        found += [f"{m.lineno}: {m.name} has no docstring" for m in members if not ast.get_docstring(m)]
    return found


def forbidden_words(text: str) -> list[str]:
    """Paths of a machine and hosts of package registries."""
    return [f"{n}: {word}" for n, line in enumerate(text.split("\n"), 1) for word in WORDS if word in line]


def not_ascii(text: str) -> list[str]:
    return [f"{n}: {line.strip()[:60]!a}" for n, line in enumerate(text.split("\n"), 1) if not line.isascii()]
