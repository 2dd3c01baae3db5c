"""The command: asks a running daemon over its control socket, and shows what it answers.

It imports neither tensors nor an event loop, so that ``lensemblectl status`` answers at once; what
needs those (``verify``, ``simulate``, ``demo``, ``data``) is run as a program of its own.
"""
