# SPDX-License-Identifier: Apache-2.0
"""Known wrong models: one mistake each, of kinds that ports of this model have made."""
