# SPDX-License-Identifier: Apache-2.0
"""The conformance run: does a backend compute this model, and if not, where does it leave it first (docs/conformance.md)."""
