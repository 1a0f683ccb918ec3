# SPDX-License-Identifier: Apache-2.0
"""Golden outputs: folders of inputs, outputs, taps and caches with a manifest (docs/golden.md)."""
