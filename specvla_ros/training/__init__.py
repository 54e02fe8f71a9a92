"""Training a small policy, and what speculation needs beside it."""
