"""The worker process of one stage."""
