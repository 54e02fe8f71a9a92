# SPDX-License-Identifier: Apache-2.0
"""The results pages: a template per page, fields for its tables, figures."""
