# SPDX-License-Identifier: Apache-2.0
"""`python -m v41`."""

from v41.cli import main

main()
