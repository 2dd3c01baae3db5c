"""Secure aggregation: the integer field that updates are summed in."""
