"""The stages that this node hosts."""
