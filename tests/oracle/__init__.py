# SPDX-License-Identifier: Apache-2.0
"""A second, independent definition of the model in NumPy float64: plain loops, no caches, no torch."""
