"""What can be wrong with a daemon's surroundings; ``lensemblectl doctor`` names it."""
