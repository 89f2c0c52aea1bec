"""Folder by which the real package is told from the stub of the package index."""
