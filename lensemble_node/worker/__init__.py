"""The worker process: blocking, single-threaded, driven by lines on its stdin."""
