"""Composition roots: what runs as a process of its own."""
