# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels: a kernel's module with one place of its text replaced, imported beside the right one.

    wrong = mutated(rms, "accumulate=i > 0", "accumulate=False", tmp_path)
    wrong.rms_norm(simulate, ...)

or, for a helper that other modules use, in the place of the right one wherever a module of the package holds it:

    everywhere(tiles, "op=nl.greater)", "op=nl.greater_equal)", tmp_path, monkeypatch)
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOME = "v41.backends.neuron"


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with `old`, which stands in its text exactly once, replaced by `new`; its file is written to folder."""
    text = Path(module.__file__).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{module.__name__}: {old!r} stands {text.count(old)} times in the text, not once")
    name = f"{module.__name__.rsplit('.', 1)[-1]}_mutant_{abs(hash((old, new)))}"
    file = folder / f"{name}.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def everywhere(module: ModuleType, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the functions and kernels of `mutated` in the place of the module's own, in every loaded module of the backend."""
    wrong = mutated(module, old, new, folder)
    theirs = {n: v for n, v in vars(wrong).items() if getattr(getattr(v, "fn", v), "__module__", "") == wrong.__name__}
    right = {id(vars(module)[n]): v for n, v in theirs.items()}
    for home in [m for n, m in sys.modules.items() if n.startswith(HOME)]:
        for name, value in list(vars(home).items()):
            if id(value) in right:
                monkeypatch.setattr(home, name, right[id(value)])
