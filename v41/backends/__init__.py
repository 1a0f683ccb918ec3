# SPDX-License-Identifier: Apache-2.0
"""Backends: values that replace bodies of the spec. Third parties register theirs under the entry-point group `v41.backends`."""
