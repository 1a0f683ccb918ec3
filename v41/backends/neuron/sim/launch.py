# SPDX-License-Identifier: Apache-2.0
"""Running a kernel: simulate and profile, the jit wrapper, one or two programs."""

import inspect
import threading
from dataclasses import dataclass

from v41.backends.neuron.sim import arrays
from v41.backends.neuron.sim.compare import compare_programs
from v41.backends.neuron.sim.context import CURRENT, Program
from v41.backends.neuron.sim.cores import Aborted, Pair
from v41.backends.neuron.sim.errors import Note, Place, SimError
from v41.backends.neuron.sim.lint import lint
from v41.backends.neuron.sim.memory import SHARED_HBM
from v41.backends.neuron.sim.report import Report, build
from v41.backends.neuron.sim.rules import STRICT, Policy
from v41.backends.neuron.sim.tensor import NkiTensor


@dataclass(frozen=True)
class Kernel:
    """A kernel function with its grid (0: none) and policy; kernel[2] runs on both cores of a logical core."""

    fn: object
    grid: object = 0
    policy: Policy = STRICT

    def __getitem__(self, grid):
        return Kernel(self.fn, grid, self.policy)

    def __call__(self, *args, **kwargs):
        if CURRENT.get() is not None:
            return self.fn(*args, **kwargs)
        return run(self, args, kwargs)[0]

    @property
    def __name__(self):
        return self.fn.__name__

    @property
    def __doc__(self):
        return self.fn.__doc__


def jit(fn=None, mode=None, platform_target=None):
    """Mark a kernel, with or without arguments in parentheses; the arguments have no meaning here."""
    return Kernel if fn is None else Kernel(fn)


def as_kernel(kernel):
    """A Kernel of a Kernel or a plain function; ValueError for anything else."""
    if isinstance(kernel, Kernel):
        return kernel
    if inspect.isfunction(kernel):
        return Kernel(kernel)
    raise ValueError(f"{kernel!r} is neither a function nor a jit kernel of the simulator")


def simulate(kernel, policy=None):
    """A callable that runs the kernel on arrays and returns its results as arrays of the same library.

    Arguments are never changed: an input that the kernel mutates and returns comes back as a new array.
    """
    kernel = as_kernel(kernel)
    kernel = kernel if policy is None else Kernel(kernel.fn, kernel.grid, policy)
    return lambda *args, **kwargs: run(kernel, args, kwargs)[0]


def profile(kernel, policy=None):
    """Like simulate, but the callable returns (results, Report)."""
    kernel = as_kernel(kernel)
    kernel = kernel if policy is None else Kernel(kernel.fn, kernel.grid, policy)
    return lambda *args, **kwargs: run(kernel, args, kwargs)


def run(kernel, args, kwargs) -> tuple[object, Report]:
    """Lint, execute, check the results; (results, Report)."""
    name = kernel.fn.__name__
    grid = _grid(kernel.grid, name)
    found = _lint(kernel, name)
    bound = _bind(kernel.fn, args, kwargs)
    inputs, torch_seen = {}, False
    for key, value in bound.items():
        _argument(value, key, name)
        if arrays.is_array(value):
            inputs[key] = arrays.to_hbm(value, key)
            torch_seen = torch_seen or arrays.is_torch(value)
    call = {**bound, **inputs}
    programs, results = _execute(kernel, name, grid, call)
    _results(programs, results, inputs)
    warnings = list(dict.fromkeys(found + [w for p in programs for w in p.warnings.values()]))
    report = build(name, programs, warnings)
    return _unwrap(results[0], torch_seen), report


def _grid(grid, name):
    if isinstance(grid, bool) or not isinstance(grid, int) or grid not in (0, 1, 2):
        raise SimError("LNC-GRID", f"grid {grid!r}", name)
    return grid


def _lint(kernel, name):
    found, raised = [], []
    for finding in lint(kernel.fn):
        place = Place(finding.file, finding.line)
        if kernel.policy.raises(finding.rule):
            raised.append((finding, place))
        else:
            found.append(Note(finding.rule, finding.text, place, "lint"))
    if raised:
        finding, place = raised[0]
        more = "".join(f"; also {f.rule} at {p}: {f.text}" for f, p in raised[1:])
        raise SimError(finding.rule, finding.text + more, name, place)
    return found


def _bind(fn, args, kwargs):
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise SimError("OP-ARG", str(error), fn.__name__) from None
    bound.apply_defaults()
    return bound.arguments


def _argument(value, key, name):
    if isinstance(value, list):
        raise SimError("PY-LISTARG", f"argument {key} is a list", name, operand=key)
    if isinstance(value, tuple) and any(arrays.is_array(v) for v in value):
        raise SimError("OP-ARG", f"argument {key} is a tuple of arrays; pass arrays one by one", name, operand=key)


def _execute(kernel, name, grid, call):
    if grid != 2:
        program = Program(name, 0, 1, grid, kernel.policy)
        return [program], [_body(kernel, program, call)]
    pair = Pair()
    programs = [Program(name, i, 2, grid, kernel.policy, pair) for i in (0, 1)]
    outcome = [None, None]
    threads = [threading.Thread(target=_thread, args=(kernel, p, call, outcome), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [o[1] for o in outcome if o[1] is not None and not isinstance(o[1], Aborted)]
    if errors:
        raise errors[0]
    compare_programs(programs)
    return programs, [o[0] for o in outcome]


def _thread(kernel, program, call, outcome):
    result = error = None
    try:
        program.pair.wait_turn(program.index)
        result = _body(kernel, program, call)
    except BaseException as caught:
        # Raised again by the caller's thread; the other program is released first.
        error = caught
    outcome[program.index] = (result, error)
    program.pair.finish(program.index, error is not None)


def _body(kernel, program, call):
    token = CURRENT.set(program)
    try:
        return kernel.fn(**call)
    except TypeError as error:
        raise _translated(error, program) from error
    finally:
        CURRENT.reset(token)


def _translated(error, program):
    """A call with arguments that an NKI function does not have becomes OP-ARG; other TypeErrors stay."""
    frame = inspect.getinnerframes(error.__traceback__)[-1]
    known = ("unexpected keyword argument", "positional argument", "multiple values for argument")
    if any(text in str(error) for text in known):
        return SimError("OP-ARG", str(error), program.kernel, Place(frame.filename, frame.lineno))
    return error


def _tensors(result):
    return list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]


def _results(programs, results, inputs):
    """PLACE-OUTPUT, INIT-OUTPUT, PLACE-MUTATED, LNC-SHARED."""
    program = programs[0]
    token = CURRENT.set(program)
    try:
        returned = _tensors(results[0])
        if len(programs) == 2:
            storages = [[getattr(t, "storage", None) for t in _tensors(r)] for r in results]
            if storages[0] != storages[1]:
                program.report("LNC-SHARED", "the two programs return different tensors", "return")
        for i, t in enumerate(returned):
            _result(program, i, t)
        kept = {id(t.storage) for t in returned}
        for name, t in inputs.items():
            if t.storage.mutated and id(t.storage) not in kept:
                program.report("PLACE-MUTATED", f"input {name} is written and not returned", "return", name)
    finally:
        CURRENT.reset(token)


def _result(program, i, t):
    if not isinstance(t, NkiTensor) or t.buffer is not SHARED_HBM:
        program.report("PLACE-OUTPUT", f"result {i} is {t!r}", "return")
    if not t.storage.complete():
        program.report("INIT-OUTPUT", f"result {i} {t!r} has bytes that no instruction wrote", "return")


def _unwrap(result, torch_seen):
    if isinstance(result, (tuple, list)):
        return tuple(arrays.from_hbm(t, torch_seen) for t in result)
    return None if result is None else arrays.from_hbm(result, torch_seen)
