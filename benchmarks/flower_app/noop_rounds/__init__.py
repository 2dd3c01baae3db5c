"""Rounds of Flower in which only moving and averaging one float32 array takes time."""
