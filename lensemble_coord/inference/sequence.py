"""One request: prefill, then a token per trip round the ring."""
