"""Federated rounds at the coordinator: the machine, its rim, and what they leave on disk."""
