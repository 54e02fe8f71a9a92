# SPDX-License-Identifier: Apache-2.0
"""`specvla demo`: an operator, the processes that it starts, and what they leave behind."""
