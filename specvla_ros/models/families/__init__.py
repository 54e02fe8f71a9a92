# SPDX-License-Identifier: Apache-2.0
"""One folder per model family: configuration, model, target and loader."""
