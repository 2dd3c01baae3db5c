"""Models too big for one node: planned, provisioned, driven, torn down."""
