# SPDX-License-Identifier: Apache-2.0
"""SBUF and PSUM of one physical core: what is live, what the peak was.

A tile lives as long as Python holds a reference to it or to a view of it, as
its register in the compiler lives until its last use. The model is
conservative: a tile occupies its bytes on all partitions, and a PSUM tile
above 2 KiB occupies whole banks.
"""

from enum import StrEnum


class MemoryRegion(StrEnum):
    """Where a tensor lives; `hbm` is private_hbm."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
PRIVATE_HBM, SHARED_HBM = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
ON_CHIP = (SBUF, PSUM)
HBM = (PRIVATE_HBM, SHARED_HBM)
ANYWHERE = ON_CHIP + HBM

SBUF_BYTES = 192 * 1024  # the budget; trn2 documents 224 KiB, part of it reserved
PSUM_BANK = 2048
PSUM_BANKS = 8
PARTITIONS = 128


class OutOfMemory(Exception):
    """The core has no room; `rule` says which memory."""

    def __init__(self, rule, text):
        super().__init__(text)
        self.rule = rule


class Lease:
    """Room held by one tile; given back when the tile dies."""

    __slots__ = ("__weakref__", "banks", "bytes", "chip")

    def __init__(self, chip, nbytes, banks):
        self.chip, self.bytes, self.banks = chip, nbytes, banks

    def __del__(self):
        self.chip.release(self)


class Chip:
    """Occupancy of one core's SBUF (bytes per partition) and PSUM (bytes per bank)."""

    def __init__(self):
        self.sbuf = self.sbuf_peak = 0
        self.banks = [0] * PSUM_BANKS
        self.psum_peak = self.bank_peak = 0

    def sbuf_lease(self, nbytes):
        """Room for a tile of nbytes per partition, rounded up to 4."""
        nbytes = -(-nbytes // 4) * 4
        if self.sbuf + nbytes > SBUF_BYTES:
            raise OutOfMemory("MEM-SBUF", f"{nbytes} bytes per partition asked, {self.sbuf} of {SBUF_BYTES} bytes are live")
        self.sbuf += nbytes
        self.sbuf_peak = max(self.sbuf_peak, self.sbuf)
        return Lease(self, nbytes, ())

    def psum_lease(self, nbytes):
        """Room for a PSUM tile: part of one bank up to 2 KiB, else whole neighboring banks."""
        if nbytes <= PSUM_BANK:
            fits = [i for i in range(PSUM_BANKS) if self.banks[i] + nbytes <= PSUM_BANK]
            chosen = fits[:1]
            share = nbytes
        else:
            count = -(-nbytes // PSUM_BANK)
            starts = [i for i in range(PSUM_BANKS - count + 1) if not any(self.banks[i : i + count])]
            chosen = list(range(starts[0], starts[0] + count)) if starts else []
            share = PSUM_BANK
        if not chosen:
            busy = sum(1 for used in self.banks if used)
            raise OutOfMemory("MEM-PSUM", f"{nbytes} bytes per partition asked, {busy} of {PSUM_BANKS} banks are in use")
        for i in chosen:
            self.banks[i] += share
        self.psum_peak = max(self.psum_peak, sum(self.banks))
        self.bank_peak = max(self.bank_peak, sum(1 for used in self.banks if used))
        return Lease(self, share, tuple(chosen))

    def release(self, lease):
        """Give a tile's room back."""
        if not lease.banks:
            self.sbuf -= lease.bytes
        for i in lease.banks:
            self.banks[i] -= lease.bytes
