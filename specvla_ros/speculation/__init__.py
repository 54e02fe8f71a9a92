"""Draft trees, what drafts them, and which drafted tokens are committed."""
