# SPDX-License-Identifier: Apache-2.0
"""The protocols that other people's clients speak: openpi's and vla-eval's websockets and OpenVLA's /act."""
