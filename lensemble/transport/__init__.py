"""Getting bytes to a peer: drivers, their links and streams, and the ends of edges on them.

``driver`` is what the rest of Lensemble sees.  Two drivers implement it with the same links
(``links``) and the same rules between links (``endpoint``); they differ below ``raw``, in QUIC or
memory.  ``ends`` puts the machines of ``lensemble.edge`` on a driver's streams.
"""
