# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: safetensors read strictly and in slices, and written so that the same tensors give the same bytes."""

from v41.checkpoint.header import DTYPES, Entry, Header, read_file_header, read_header
from v41.checkpoint.reader import INDEX, Folder, gather_rows, open_folder, read_columns, read_rows, read_tensor
from v41.checkpoint.values import check_values
from v41.checkpoint.writer import tensor_bytes, write_file, write_folder

__all__ = [
    "DTYPES",
    "INDEX",
    "Entry",
    "Folder",
    "Header",
    "check_values",
    "gather_rows",
    "open_folder",
    "read_columns",
    "read_file_header",
    "read_header",
    "read_rows",
    "read_tensor",
    "tensor_bytes",
    "write_file",
    "write_folder",
]
