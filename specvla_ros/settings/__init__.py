"""Parameters: declared once, read everywhere."""
