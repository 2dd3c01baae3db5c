"""Which node computes which layers."""
