# SPDX-License-Identifier: Apache-2.0
"""One byte of a pack changed, in a tensor of every class: refused by its digest, and found by comparison where the digest is forged too."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from v41.checkpoint import read_header, read_tensor
from v41.conformance.blocks import teacher_forced
from v41.conformance.claims import Claims
from v41.conformance.target import Target
from v41.conformance.walk import Opened, every_stop
from v41.golden.folder import MANIFEST, digest
from v41.golden.pack import open_pack
from v41.golden.pack_noise import EXACT, TRIPS
from v41.spec.backend import Backend

INFORMS = ("route_score", EXACT, TRIPS)  # nothing of an equal backend is compared with these


def class_of(name: str, dtype: str) -> tuple[str, str]:
    """What tensors of a pack have in common: their name without call and layer, and their dtype."""
    parts = [p for p in name.split(".")[1:] if not p.isdigit()]
    return ".".join(parts), dtype


def classes(opened: Opened) -> dict[tuple[str, str], tuple[str, str]]:
    """(scenario, tensor) of the first tensor of every class."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for scenario, listed in opened.pack.manifest["tensors"].items():
        for name, entry in listed.items():
            if all(entry["shape"]):
                found.setdefault(class_of(name, entry["dtype"]), (scenario, name))
    return found


def flip(file: Path, name: str) -> None:
    """The lowest bit of a tensor's first byte changed on disk."""
    start = read_header(file)[name].start
    data = bytearray(file.read_bytes())
    data[start] ^= 1
    file.write_bytes(bytes(data))


def refused(path: Path, scenario: str, name: str) -> str | None:
    """How the edited pack is refused; None where it is read."""
    try:
        open_pack(path).read(scenario, name)
    except ValueError as e:
        return "refused: " + str(e).split(": ")[-1]
    return None


def forge(path: Path, scenario: str, name: str) -> None:
    """The digest of the changed tensor written into the manifest."""
    file = path / MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8"))
    shard = path / f"{scenario}.safetensors"
    manifest["tensors"][scenario][name]["sha256"] = digest(read_tensor(shard, name, read_header(shard)[name]))
    file.write_text(json.dumps(manifest), encoding="utf-8")


def compared(path: Path, opened: Opened, scenario: str, call: str) -> str | None:
    """The first tensor of the call that an equal backend does not match."""
    edited = replace_pack(opened, path)
    target = Target("spec", Backend("spec"), Claims(bits=frozenset({"faithful", "released", "exact", "trn2"})))
    try:
        stop = next(s for s in every_stop(edited) if s.scenario == scenario and s.call == call)
        bad = [f for f in teacher_forced(target, edited, stop) if f.bad] if stop.op in ("step", "draft", "verify") else []
    except (ValueError, IndexError) as e:
        return f"{type(e).__name__}: {e}"
    return f"differs: {bad[0].name}" if bad else None


def replace_pack(opened: Opened, path: Path) -> Opened:
    return Opened(open_pack(path), opened.params)


def edits(opened: Opened, folder: Path) -> Iterator[tuple[str, str | None]]:
    """(class, how it was caught or None)."""
    copy = folder / "edited"
    shutil.copytree(opened.pack.path, copy)
    for (part, dtype), (scenario, name) in sorted(classes(opened).items()):
        files = {f: f.read_bytes() for f in (copy / f"{scenario}.safetensors", copy / MANIFEST)}
        flip(copy / f"{scenario}.safetensors", name)
        first = refused(copy, scenario, name)
        second: str | None = "informs only"
        if not name.endswith(INFORMS):
            forge(copy, scenario, name)
            second = compared(copy, opened, scenario, name.split(".")[0])
        for file, data in files.items():
            file.write_bytes(data)
        yield f"{part} ({dtype})", f"{first}; {second}" if first and second else None
