# SPDX-License-Identifier: Apache-2.0
"""Runs over a checkpoint that is read as it goes: one layer at a time, routed experts and hashed rows only (docs/checkpoints.md 4)."""

from v41.stream.make import check_streamed, make_part, make_streamed
from v41.stream.plan import ReadPlan, Unit, read_plan, stream_plan
from v41.stream.run import Job, job_over, prepare_run
from v41.stream.source import Log, Source, folder_source, recipe_source

__all__ = [
    "Job",
    "Log",
    "ReadPlan",
    "Source",
    "Unit",
    "check_streamed",
    "folder_source",
    "job_over",
    "make_part",
    "make_streamed",
    "prepare_run",
    "read_plan",
    "recipe_source",
    "stream_plan",
]
