"""A run of a model, from its plan to its teardown."""
