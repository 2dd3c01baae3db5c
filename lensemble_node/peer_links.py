"""Links to other nodes of a chain of stages."""
