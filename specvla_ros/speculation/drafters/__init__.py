"""What drafts tokens: draft heads, earlier answers, lookup, the target itself."""
