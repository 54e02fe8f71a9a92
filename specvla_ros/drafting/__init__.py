"""Draft sources: the tokens that a verification may commit. None yet: mode `ar` verifies the root alone."""
