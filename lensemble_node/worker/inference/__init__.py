"""The worker of one stage: fetches weights, computes layers."""
