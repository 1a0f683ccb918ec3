# SPDX-License-Identifier: Apache-2.0
"""Records of a run: what each finished unit of work gave, so that a run that was killed goes on where it stopped.

A record is one safetensors file, written under another name and renamed. Its metadata holds the digest of the job that it belongs to, the
digest of its tensors, and the digests of the checkpoint tensors that the unit read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from v41.checkpoint import read_file_header, read_tensor, write_file
from v41.golden import folder
from v41.stream.source import Log

JOB = "job.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Records:
    """A folder of records of one job."""

    path: Path
    job: str

    def load(self, unit: str) -> tuple[dict[str, Tensor], Log] | None:
        """The tensors and the log of a unit, None where it has no record; ValueError for a record that is damaged or of another job."""
        file = self.path / (unit + SUFFIX)
        if not file.is_file():
            return None
        header = read_file_header(file)
        tensors = {name: read_tensor(file, name, entry) for name, entry in header.entries.items()}
        if header.metadata.get("job") != self.job or header.metadata.get("sha256") != _digest(tensors):
            raise ValueError(f"{file}: damaged, or of another run; remove it to have its unit computed again")
        return tensors, Log(**json.loads(header.metadata["read"]))

    def save(self, unit: str, tensors: dict[str, Tensor], log: Log) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        metadata = {"job": self.job, "sha256": _digest(tensors), "read": json.dumps(log.as_dict(), separators=(",", ":"))}
        write_file(self.path / (unit + SUFFIX), tensors, metadata)

    def remove(self) -> None:
        """Removes the folder and what belongs in it, nothing else."""
        for file in sorted(self.path.glob("*" + SUFFIX)) + sorted(self.path.glob("*.part")):
            file.unlink()
        (self.path / JOB).unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()


def _digest(tensors: dict[str, Tensor]) -> str:
    return folder.text_digest(json.dumps(folder.describe(tensors), sort_keys=True))


def open_records(path: Path, job: dict[str, Any]) -> Records:
    """The records of a job, new or from before; ValueError naming the first thing in which the job of the folder is another."""
    file, text = path / JOB, json.dumps(job, sort_keys=True)
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON: {error}") from error
        other = [key for key in job if not isinstance(before, dict) or before.get(key) != job[key]]
        if other:
            raise ValueError(f"{path}: records of another run ({', '.join(other)} differ); remove the folder, or give another --out")
    elif path.exists() and any(path.iterdir()):
        raise ValueError(f"{path}: holds files but no {JOB}; it is no folder of records")
    path.mkdir(parents=True, exist_ok=True)
    folder.write_json(file, job)
    return Records(path, folder.text_digest(text))
