"""The nodes that are here, for whoever places work on them."""
