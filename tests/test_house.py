# SPDX-License-Identifier: Apache-2.0
"""The house rules hold, and each rule finds its breach in a small bad example."""

import ast
import gzip
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import house
import pytest
from helpers import ROOT

import v41
from v41.spec.backend import Backend, definition

CODE = sorted((ROOT / "v41").rglob("*.py"))
SPEC = [p for p in CODE if p.is_relative_to(ROOT / "v41" / "spec")]
STANDARD = frozenset(sys.stdlib_module_names)


@cache
def tracked() -> list[Path]:
    """Every file of the repository but the golden data: what git tracks or would; all files where there is no git."""
    try:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found = [ROOT / line for line in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        hidden = [p for p in ROOT.rglob("*") if any(part[0] in "._" for part in p.relative_to(ROOT).parts[:-1])]
        found = sorted(set(ROOT.rglob("*")) - set(hidden))
    return sorted(p for p in found if p.is_file() and not p.is_relative_to(ROOT / "tests" / "golden"))


def texts(paths: list[Path]) -> dict[str, str]:
    found = {}
    for path in paths:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            found[str(path.relative_to(ROOT))] = content.decode("utf-8")
        except UnicodeDecodeError:  # weights
            assert path.suffix in (".safetensors", ".png"), path
    return found


def module_of(path: Path) -> tuple[str, bool]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return (".".join(parts[:-1]), True) if parts[-1] == "__init__" else (".".join(parts), False)


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def breaches(rule, paths: list[Path], parsed: bool = True) -> list[str]:
    found = {name: rule(tree_of(text) if parsed else text) for name, text in texts(paths).items()}
    return [f"{name}:{line}" for name, lines in found.items() for line in lines]


def python_files() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".py"]


# The repository


def test_imports_go_one_way():
    wrong = [w for p in CODE for w in house.wrong_imports(tree_of(p.read_text()), *module_of(p), STANDARD)]
    assert wrong == []


def test_the_oracle_shares_nothing_with_what_it_judges():
    for path in (ROOT / "tests" / "oracle").glob("*.py"):
        names = [n.split(".")[0] for n, _ in house.imports(ast.parse(path.read_text()), "oracle.x", False)]
        assert not {"v41", "torch"} & set(names), path


def test_every_python_file_starts_with_the_licence():
    files = python_files()
    assert len(files) > 60 and breaches(house.no_licence, [p for p in files if p.stat().st_size], parsed=False) == []


def test_files_and_functions_stay_small():
    assert breaches(house.too_long, CODE, parsed=False) == []
    assert breaches(house.long_functions, CODE) == []


def test_the_spec_changes_nothing_in_place():
    assert breaches(house.mutations, SPEC) == []


def test_the_spec_reads_no_tensor_value_and_no_environment():
    assert breaches(house.host_reads, SPEC) == []


def test_what_is_public_says_what_it_is():
    """Everything in `v41`'s own namespace and every primitive, where it is defined; and every module."""
    public = [getattr(v41, name) for name in v41.__all__] + [definition(f) for f in fields(Backend)[1:]]
    places = {(thing.__module__, thing.__name__) for thing in public if hasattr(thing, "__module__") and hasattr(thing, "__name__")}
    assert len(places) > 50
    for path in CODE:
        module = module_of(path)[0]
        assert house.undocumented(tree_of(path.read_text()), {n for m, n in places if m == module}) == [], path


def test_no_file_names_a_machine_or_a_registry():
    assert breaches(house.forbidden_words, tracked(), parsed=False) == []


def test_code_is_ascii():
    assert breaches(house.not_ascii, [p for p in tracked() if p.suffix in (".py", ".toml", ".sh")], parsed=False) == []


# The rules


@pytest.mark.parametrize(
    "module, text",
    [
        ("v41.spec.block", "from v41.backends.cpu import backend"),
        ("v41.spec.block", "import v41.api"),
        ("v41.spec.block", "from v41 import checks"),
        ("v41.spec.block", "def f():\n    from ..sharding import rules"),
        ("v41.spec.ops.norm", "import numpy as np"),
        ("v41.sharding.rules", "from v41.spec.model import step"),
        ("v41.sharding.rules", "from v41.backends import cpu"),
        ("v41.backends.cpu.moe", "from v41.api import step"),
        ("v41.backends.neuron.sim.pe", "from v41.spec.ops import quant"),
        ("v41.checkpoint.reader", "from v41.spec.config import Config"),
        ("v41.recipe_words", "from v41 import tree"),
        ("v41.tree", "from v41.spec import table"),
    ],
)
def test_an_import_against_the_direction_is_found(module, text):
    assert len(house.wrong_imports(ast.parse(text), module, False, STANDARD)) == 1


def test_imports_along_the_direction_are_not_found():
    text = "import math, torch\nfrom torch.nn import functional\nfrom v41 import tree\nfrom v41.spec.ops import norm\nfrom .ops import x"
    assert house.wrong_imports(ast.parse(text), "v41.spec.block", False, STANDARD) == []
    assert house.wrong_imports(ast.parse("from v41.spec import params, config"), "v41.sharding.rules", False, STANDARD) == []


@pytest.mark.parametrize(
    "text",
    [
        "x.add_(1)",
        "x += y",
        "x[0] = y",
        "x[0][1] = y",
        "x.data = y",
        "a, x[0] = y",
        "rows[a], b = f(x), 1\n    rows = list(x)\n    x[1] = 3",
        "torch.add(x, y, out=x)",
        "global x",
        "for x[0] in y:\n        pass",
        "x.index_put_((i,), y)",
    ],
)
def test_a_mutation_is_found(text):
    assert len(house.mutations(ast.parse(f"import torch\ndef f(x, y):\n    {text}"))) == 1


def test_lists_and_dicts_of_a_function_are_its_own():
    text = "import torch\ndef f(x):\n    a, c = 1, [1]\n    a = list(x)\n    a[0] = x.q\n    d: dict = {}\n    d['k'] = x.__init__()\n"
    assert house.mutations(ast.parse(text)) == []
    assert len(house.mutations(ast.parse(text + "def g(a):\n    a[0] = 1\n"))) == 1  # another function's
    assert house.mutations(ast.parse(text.replace("import torch", "import json") + "    x[1] = 2\n")) == []  # no tensors there


@pytest.mark.parametrize("text", ["x.item()", "x.tolist()", "x.cpu()", "x.numpy()", "os.environ['A']", "os.getenv('A')"])
def test_a_host_read_is_found(text):
    assert len(house.host_reads(ast.parse(text))) == 1


def test_budgets_are_counted_without_signature_and_docstring():
    def function(lines: int) -> str:
        return "def f(\n    a,\n    b,\n):\n" + '    """One.\n\n    Two.\n    """\n' + "    a\n" * lines

    assert house.long_functions(ast.parse(function(40))) == []
    assert len(house.long_functions(ast.parse(function(41)))) == 1
    assert house.too_long("a\n" * 300) == [] and len(house.too_long("a\n" * 301)) == 1


def test_missing_docstrings_licences_words_and_letters_are_found():
    functions = '"""M."""\ndef f():\n    pass\ndef g():\n    """G."""\n'
    text = functions + 'class C:\n    """C."""\n    def h(self):\n        pass\n    def _i(self):\n        pass\n'
    assert [w.split()[1] for w in house.undocumented(ast.parse(text), {"f", "g", "C"})] == ["f", "h"]
    assert house.undocumented(ast.parse("x = 1"), set()) == ["1: the module has no docstring"]
    assert house.no_licence('"""No."""\n') and not house.no_licence(house.LICENCE + "\n")
    for word in house.WORDS:
        assert len(house.forbidden_words(f"a\nsee {word}x")) == 1
    assert house.not_ascii("a\n\u2014\n") == ["2: '\\u2014'"] and house.not_ascii("a\n") == []
