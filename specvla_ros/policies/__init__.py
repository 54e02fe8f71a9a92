"""Policies that come with the package; see the model cards."""
