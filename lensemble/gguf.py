"""The header of a GGUF file."""
