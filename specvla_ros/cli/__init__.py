"""The specvla command."""
