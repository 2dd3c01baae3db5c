"""What travels between a coordinator and a node, and how it becomes bytes."""
