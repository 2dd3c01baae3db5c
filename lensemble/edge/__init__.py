"""Edges: what one is, its two ends as machines, and the memory their rings are leased from."""
