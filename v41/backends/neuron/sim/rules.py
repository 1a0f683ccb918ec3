# SPDX-License-Identifier: Apache-2.0
"""Every rule the simulator enforces, as data: id, severity, statement, source, whether a device was seen to enforce it.

docs/nki-simulator.md prints this table; a test keeps the two equal. Sources:
"doc" = NKI 0.6 documentation; "field" = a public third-party report of a trn2
run or compile; "library" = usage in public kernels; "inferred" = follows from
the others, stated by none. Nothing here was run on a device by this project.
"""

from dataclasses import dataclass

DOC = "docs/nki-simulator.md"


@dataclass(frozen=True)
class Rule:
    """One rule; `section` is its heading in docs/nki-simulator.md."""

    id: str
    severity: str
    section: str
    text: str
    source: str
    seen: str = "no"


def _rules(section, *rows):
    return tuple(Rule(id, severity, section, text, source, *seen) for id, severity, text, source, *seen in rows)


MEMORY = _rules(
    "Shapes and memory",
    ("MEM-PARTITIONS", "error", "an on-chip tensor has at most 128 partitions", "doc"),
    (
        "MEM-START",
        "error",
        "compute operands start on partition 0 (any count), 64 (<= 64 partitions), 32 or 96 (<= 32)",
        "doc",
        "by others",
    ),
    ("MEM-STEP", "error", "partitions are consecutive: no stepped or stride-0 partition dimension", "field", "by others"),
    ("MEM-SHAPE", "error", "operands agree in partitions and in elements per partition", "doc"),
    ("MEM-BOUNDS", "error", "a view stays inside its tensor and is not empty", "doc"),
    ("MEM-VIEW", "error", "a view method keeps its documented constraints (partition dim fixed, size-1 broadcast, ...)", "doc"),
    ("MEM-DIMS", "error", "a view has at most 5 dimensions (so at most 4 free ones on chip), a searched tile 3", "doc"),
    ("MEM-STRIDE", "error", "engine access counts fit uint16 and strides int16", "doc"),
    ("MEM-SBUF", "error", "live SBUF tiles fit 192 KiB per partition", "inferred"),
    ("MEM-PSUM", "error", "live PSUM tiles fit 8 banks of 2 KiB per partition", "doc"),
    ("MEM-BANK", "error", "a matmul result stays inside one 2 KiB PSUM bank", "doc"),
    ("MEM-MATMUL", "error", "matmul: K <= 128, M <= 128, N <= 512, tiling position a multiple of the tile size", "doc"),
    ("MEM-STATIONARY", "error", "a stationary operand has one free dimension once contiguous dimensions are merged", "field", "by others"),
    ("MEM-RANGE", "error", "an instruction's element count limits hold (max8 and index ops: 8..16384, bn_stats: 512, ...)", "doc"),
    ("MEM-DMA3D", "warning", "a DMA whose HBM side has 3 or more dimensions onto part of a tile's partitions", "field", "by others"),
    ("MEM-ADDRESS", "warning", "explicit tile addresses are not modeled: overlap of manual tiles is not seen", "inferred"),
)

INIT = _rules(
    "Initialization",
    ("INIT-POISON", "error", "no instruction reads a byte that was never written", "inferred"),
    ("INIT-ACCUMULATE", "error", "a matmul accumulates only onto PSUM last written by a matmul", "doc"),
    ("INIT-OUTPUT", "error", "a returned tensor has every byte written", "inferred"),
    ("INIT-REGISTER", "error", "a register is written before it is read", "doc"),
    ("INIT-ACCREG", "error", "an engine's accumulator is reset before it is reduced into or read", "doc"),
)

PLACEMENT = _rules(
    "Placement",
    ("PLACE-BUFFER", "error", "an operand is where its engine can reach it (DMA and GpSimd: no PSUM); constants are read-only", "doc"),
    ("PLACE-PSUM2", "error", "two tensor inputs of one VectorE instruction are not both in PSUM", "doc"),
    ("PLACE-MATMUL", "error", "matmul operands are in SBUF and its result is in PSUM", "doc"),
    ("PLACE-GATHER", "error", "a vector-indexed DMA has its base in HBM and its index in SBUF", "doc"),
    ("PLACE-OUTPUT", "error", "kernel results are shared_hbm tensors", "doc"),
    ("PLACE-MUTATED", "error", "an input that the kernel writes is also returned", "field", "by others"),
    ("PLACE-MUTATED2", "warning", "one input is written twice through overlapping views", "field", "by others"),
    ("PLACE-CONTIGUOUS", "error", "kernel inputs are contiguous: the kernel sees the storage", "doc"),
    ("PLACE-ENGINE", "error", "the requested engine exists for the instruction", "doc"),
)

TYPES = _rules(
    "Dtypes",
    ("TYPE-BITVEC", "error", "bit operations take integer tensors only and do not mix with arithmetic", "doc"),
    ("TYPE-OPERAND", "error", "a tile operand of an arithmetic tensor_scalar, a scale or a bound is float32", "doc", "by others"),
    ("TYPE-ROW", "error", "a tile operand is a (P, 1) column, not a (1, N) row", "doc", "by others"),
    ("TYPE-PREDICATE", "error", "predicates have an unsigned (or listed) integer dtype", "doc"),
    ("TYPE-SELECT", "error", "select_reduce on_true is not int32, uint32 or tfloat32", "doc"),
    ("TYPE-SAME", "error", "the instruction needs equal dtypes", "doc"),
    ("TYPE-TRANSPOSE8", "error", "no 1-byte dma_transpose and no fp8 transpose on TensorE here", "field", "by others"),
    ("TYPE-MATMUL", "error", "matmul: float operands; float32 pairs only with float32; PSUM result float32", "doc"),
    ("TYPE-E4M3FN", "error", "float8_e4m3fn does not compute on trn2: carry it, view it, decode it", "doc", "by others"),
    ("TYPE-CARRIER", "error", "a storage-only dtype is not the source or result of a conversion", "doc"),
    ("TYPE-HWDGE", "error", "a hardware-DGE copy does not change the dtype", "doc"),
    ("TYPE-MEMSET", "error", "a memset value is representable in the tensor's dtype", "doc"),
    ("TYPE-INDEX", "error", "index tensors are uint32 (uint16 for local_gather)", "doc", "by others"),
    ("TYPE-INDEX32", "error", "a vector or scalar DMA index tile is uint32, not int32", "field", "by others"),
    ("TYPE-DTYPE", "error", "the dtype exists on trn2 and the instruction accepts it", "doc"),
)

OPS = _rules(
    "Operations and calls",
    ("OP-GEN4", "error", "the call or argument needs gen4 (Trn3)", "doc"),
    ("OP-HARDWARE", "error", "divide, mod, fmod and arithmetic shift do not exist on hardware", "field", "by others"),
    ("OP-ALU", "error", "the operator is legal for this instruction on trn2", "doc"),
    ("OP-ABSMAX", "error", "abs_max and abs_min are refused: reported to keep the sign in reductions", "field", "by others"),
    ("OP-IMMEDIATE", "warning", "a bit-operation immediate other than a power of two, 0 or -1", "field"),
    ("OP-ENUM", "error", "modes and engines are enumeration members, not their numbers", "doc"),
    ("OP-ARG", "error", "the argument exists and has the documented form", "doc"),
    ("OP-DMA", "error", "the DMA form is legal (element counts, modes, permutations, index shapes)", "doc"),
    ("OP-OOB", "error", "an index is in range, or the DMA says oob_mode.skip", "doc"),
    ("OP-SUBSET", "error", "the call is outside the simulated subset", "inferred"),
    ("OP-LIMIT", "error", "at most 5,000,000 instructions in a kernel and 1,000,000 iterations in a while loop", "field", "by others"),
)

NUMERICS = _rules(
    "Numerics",
    ("NUM-RANGE", "error", "an activation input is inside the function's documented range", "doc"),
    ("NUM-NAN8", "error", "no NaN into max8, index or top-k instructions", "inferred"),
    ("NUM-FP8", "error", "a value cast to fp8 is inside its range: overflow behavior is not documented", "library"),
    ("NUM-INT24", "error", "an int32 or uint32 of magnitude >= 2**24 does not go through float32", "doc"),
    ("NUM-NAN-INT", "error", "no NaN cast to an integer", "inferred"),
    ("NUM-NONFINITE", "warning", "an instruction made NaN or infinity from finite inputs", "inferred"),
)

PYTHON = _rules(
    "Python subset",
    ("PY-SOURCE", "error", "the source of a kernel or helper can be read, and it is a def", "inferred"),
    ("PY-RAISE", "error", "no raise in traced code (assert is fine)", "field", "by others"),
    ("PY-TRY", "error", "no try", "field"),
    ("PY-WITH", "error", "no with, except nl.no_reorder()", "doc"),
    ("PY-IS", "error", "no is / is not", "doc", "by others"),
    ("PY-TARGET", "error", "a for target is one plain name", "field", "by others"),
    ("PY-ITER", "error", "no zip or enumerate", "field", "by others"),
    ("PY-STAR", "error", "no starred expansion", "field"),
    ("PY-COMPREHENSION", "error", "no comprehension in a helper", "field", "by others"),
    ("PY-PARAMS", "error", "no keyword-only parameters; no defaults in helpers (they are dropped)", "field", "by others"),
    ("PY-LISTARG", "error", "no list among a kernel's arguments: use a tuple", "doc"),
    ("PY-GLOBAL", "error", "no global or nonlocal", "field"),
    ("PY-LAMBDA", "error", "no lambda", "field"),
    ("PY-CLOSURE", "error", "no closure over local names, except the body of a dynamic loop", "field", "by others"),
    ("PY-METHOD", "error", "no method call on a constant", "field", "by others"),
    ("PY-TILESIZE", "error", "nl.tile_size is not read at import", "doc", "by others"),
    ("PY-WHILE", "error", "no Python while, yield, await or match: registers and nl.while_loop", "doc"),
    ("PY-BODY", "error", "a dynamic loop body keeps no Python state (it is traced once)", "doc"),
    ("PY-REGISTER", "error", "a register has no value while tracing: no int(), bool() or arithmetic on it", "doc"),
)

LNC = _rules(
    "Two cores",
    ("LNC-GRID", "error", "the grid is 1 or 2, as a bare int", "doc", "by others"),
    ("LNC-SEQUENCE", "error", "both programs issue the same instructions, DMA excepted", "doc"),
    ("LNC-SEQUENCE-DMA", "warning", "the programs issue different DMAs (as in a store guarded by program_id)", "library"),
    ("LNC-RENDEZVOUS", "error", "barriers and sendrecv pair up, with matching ranks, pipe, shape and dtype", "doc"),
    ("LNC-WRITE", "error", "the two cores do not write different values to the same HBM bytes between barriers", "doc"),
    ("LNC-WRITE-SAME", "warning", "both cores write the same values to the same HBM bytes", "inferred"),
    ("LNC-READ", "warning", "a core reads HBM that the other writes between the same barriers", "doc"),
    ("LNC-SHARED", "error", "both programs allocate the same shared tensors and return the same results", "doc"),
)

HAZARDS = _rules(
    "Hazards",
    (
        "HAZ-OVERLAP",
        "warning",
        "dst overlaps a source of another pattern, or any source of a GpSimd library call",
        "field",
        "by others",
    ),
    ("HAZ-SCRATCH", "warning", "HBM scratch written with one pattern and read with another", "field", "by others"),
    ("HAZ-SCATTER", "warning", "a scatter names one row twice: the order of writes is not defined", "inferred"),
    ("HAZ-NESTED", "warning", "a dynamic loop inside a dynamic loop", "doc"),
    ("HAZ-IDLE", "error", "reduce_cmd.idle with a reduce_res reads an accumulator that idle may disturb", "doc"),
)

RULES = MEMORY + INIT + PLACEMENT + TYPES + OPS + NUMERICS + PYTHON + LNC + HAZARDS
BY_ID = {rule.id: rule for rule in RULES}
PYTHON_IDS = frozenset(rule.id for rule in PYTHON)


@dataclass(frozen=True)
class Policy:
    """Which error rules only warn (`demote`) and which warnings raise (`promote`)."""

    demote: frozenset = frozenset()
    promote: frozenset = frozenset()

    def raises(self, rule_id):
        """Whether breaking this rule stops the kernel."""
        severity = BY_ID[rule_id].severity
        return rule_id in self.promote or (severity == "error" and rule_id not in self.demote)


STRICT = Policy()
# For kernels that others wrote: habits that a newer compiler refuses are reported, wrong results are not tolerated.
FOREIGN = Policy(demote=PYTHON_IDS - {"PY-REGISTER"} | {"TYPE-INDEX32", "MEM-STATIONARY", "OP-ENUM"})
PEDANTIC = Policy(promote=frozenset(rule.id for rule in RULES if rule.severity == "warning"))
