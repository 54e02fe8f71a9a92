"""Reports as HTML pages, in one style."""
