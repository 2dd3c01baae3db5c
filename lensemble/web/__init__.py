"""What a daemon serves over HTTP: connections with limits, and its figures for Prometheus.

The packages for it are the extra ``http``; a daemon that serves nothing over HTTP needs none of
them, so the modules here are imported where something is served.
"""
