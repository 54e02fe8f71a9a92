# SPDX-License-Identifier: Apache-2.0
"""LeRobot datasets: read as bags, and written from them."""
