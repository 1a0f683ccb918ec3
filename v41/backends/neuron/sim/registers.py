# SPDX-License-Identifier: Apache-2.0
"""Virtual registers and dynamic loops: the body runs once per iteration with a fresh register."""

from v41.backends.neuron.sim.context import current, fail
from v41.backends.neuron.sim.cost import LOOP_FIXED
from v41.backends.neuron.sim.memory import HBM, SBUF

MAX_ITERATIONS = 1_000_000
INTS = ("int32", "uint32", "int16", "uint16", "int8", "uint8")


def _no_value(name):
    def refuse(self, *ignored):
        fail("PY-REGISTER", f"{name} of a register: its value is not known while tracing", name)
        return NotImplemented

    return refuse


class VirtualRegister:
    """A register; its value is visible to instructions only."""

    __slots__ = ("value",)
    __int__ = _no_value("int()")
    __index__ = _no_value("index")
    __bool__ = _no_value("bool()")
    __float__ = _no_value("float()")
    __add__ = __radd__ = _no_value("+")
    __sub__ = __rsub__ = _no_value("-")
    __mul__ = __rmul__ = _no_value("*")
    __floordiv__ = __mod__ = _no_value("// or %")
    __lt__ = __le__ = __gt__ = __ge__ = _no_value("comparison")

    def __init__(self, value=None):
        self.value = value


def register_value(register, op, role):
    """Value of a register (or a plain int); INIT-REGISTER when it was never written."""
    if isinstance(register, VirtualRegister):
        if register.value is None:
            fail("INIT-REGISTER", "the register was never written", op, role)
        return register.value
    if isinstance(register, int) and not isinstance(register, bool):
        return register
    return fail("OP-ARG", f"{register!r} is neither a register nor an int", op, role)


def index_value(ins, role, t):
    """Value of a view's scalar run-time offset."""
    source = t.index.source
    if isinstance(source, (VirtualRegister, int)):
        return register_value(source, ins.op, role)
    tile = ins.tensor(f"{role}.scalar_offset", source, (SBUF,))
    if tile.size != 1:
        ins.fail("OP-ARG", f"scalar_offset tile {tile.shape} is not one element", role)
    ins.dtype(f"{role}.scalar_offset", tile, ("uint32", "int32"), "TYPE-INDEX")
    if tile.dtype != "uint32":
        ins.fail("TYPE-INDEX32", "scalar_offset tile is int32", role)
    return int(ins.raw(f"{role}.scalar_offset", tile).reshape(-1)[0])


def register_alloc(x=None):
    """A register, optionally with an int value."""
    if isinstance(x, VirtualRegister) or not (x is None or isinstance(x, int)):
        fail("OP-ARG", f"{x!r}: None or an int", "nisa.register_alloc", "x")
    return VirtualRegister(x)


def register_move(dst, src):
    """dst = src (an int or a register)."""
    if not isinstance(dst, VirtualRegister):
        fail("OP-ARG", f"{dst!r} is not a register", "nisa.register_move", "dst")
    dst.value = register_value(src, "nisa.register_move", "src")


def register_load(dst, src):
    """dst = the one element of an integer HBM or SBUF tensor."""
    from v41.backends.neuron.sim.instr import Instr

    ins = Instr("nisa.register_load")
    if not isinstance(dst, VirtualRegister):
        ins.fail("OP-ARG", f"{dst!r} is not a register", "dst")
    tile = ins.tensor("src", src, (SBUF,) + HBM)
    if tile.size != 1:
        ins.fail("OP-ARG", f"{tile.shape} is not one element", "src")
    ins.dtype("src", tile, INTS)
    dst.value = int(ins.raw("src", tile).reshape(-1)[0])
    ins.finish("sync", 0.1)


def register_store(dst, src):
    """The one element of an integer tensor = a register."""
    from v41.backends.neuron.sim.instr import Instr

    ins = Instr("nisa.register_store")
    tile = ins.tensor("dst", dst, (SBUF,) + HBM)
    if tile.size != 1:
        ins.fail("OP-ARG", f"{tile.shape} is not one element", "dst")
    ins.dtype("dst", tile, INTS)
    value = register_value(src, ins.op, "src")
    codes = tile.codes().copy()
    codes[...] = value
    ins.put_raw("dst", tile, codes)
    ins.finish("sync", 0.1)


def _loop(program, op):
    if program.loops:
        fail("HAZ-NESTED", "a dynamic loop inside a dynamic loop", op)
    if program.ordered:
        fail("OP-ARG", "a dynamic loop inside nl.no_reorder()", op)
    program.loops += 1
    program.log.append((f"{op} begin", None))
    program.clock.barrier(LOOP_FIXED / 2)


def _body(program, body, register, outer):
    """One iteration: instructions are logged on the first one only, as the body is traced once."""
    mark = len(program.log)
    result = body(register)
    if outer:
        del program.log[mark:]
    return result


def _end(program, op):
    program.loops -= 1
    program.clock.barrier(LOOP_FIXED / 2)
    program.log.append((f"{op} end", None))


def fori_loop(lower, upper, body_fun, step=1):
    """body_fun(register) for lower <= i < upper; bounds are ints or registers, step a positive int."""
    op, program = "nl.fori_loop", current()
    if not isinstance(step, int) or step < 1:
        fail("OP-ARG", f"step {step!r} is no positive int", op, "step")
    first, last = register_value(lower, op, "lower"), register_value(upper, op, "upper")
    _loop(program, op)
    for count, i in enumerate(range(first, last, step)):
        if _body(program, body_fun, VirtualRegister(i), count > 0) is not None:
            fail("OP-ARG", "the body of a fori_loop returns nothing", op, "body_fun")
    _end(program, op)


def while_loop(init, body_fun):
    """r = body_fun(r) while r is not 0."""
    op, program = "nl.while_loop", current()
    if not isinstance(init, VirtualRegister):
        fail("OP-ARG", f"{init!r} is not a register", op, "init")
    value = register_value(init, op, "init")
    _loop(program, op)
    count = 0
    while value != 0:
        if count >= MAX_ITERATIONS:
            fail("OP-LIMIT", f"more than {MAX_ITERATIONS} iterations", op)
        result = _body(program, body_fun, VirtualRegister(value), count > 0)
        if not isinstance(result, VirtualRegister):
            fail("OP-ARG", f"the body returned {result!r}, not a register", op, "body_fun")
        value = register_value(result, op, "body_fun")
        count += 1
    _end(program, op)
