# SPDX-License-Identifier: Apache-2.0
"""The enumerations of nki.isa 0.6."""

from enum import Enum


class engine(Enum):
    """Engines."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does to its engine's accumulator."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who builds DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What an out-of-range index does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """TensorE modes of gen3."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """NeuronCore generations, ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other):
        return self.value < other.value

    def __le__(self, other):
        return self.value <= other.value

    def __gt__(self, other):
        return self.value > other.value

    def __ge__(self, other):
        return self.value >= other.value


class dma_engine(Enum):
    """Transport of sendrecv."""

    dma = 1
    gpsimd_dma = 2
