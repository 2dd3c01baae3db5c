"""Whole federations on this machine: simulation in one process, and the demo of real processes."""
