# SPDX-License-Identifier: Apache-2.0
"""The Trainium2 backend: NKI kernels and the strict CPU simulator that runs them (docs/nki-simulator.md)."""
