# SPDX-License-Identifier: Apache-2.0
"""Where tensors live: mesh, rules by logical axis, shards of parameters and caches, and what a placement costs (docs/sharding.md)."""
