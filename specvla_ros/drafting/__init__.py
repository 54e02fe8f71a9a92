"""Draft sources: the tokens that a verification may commit."""
