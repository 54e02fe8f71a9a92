# SPDX-License-Identifier: Apache-2.0
"""Work spread over processes or a Ray cluster."""
