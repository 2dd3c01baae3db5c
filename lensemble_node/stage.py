"""One stage of a model on this node, from its provision to its end."""
