"""The verbs, one module each; ``lensemblectl.app`` gathers them."""
