"""The node: a daemon that holds no tensor, and the worker process it drives.

Three pure machines decide: ``participation`` (dial, join, serve a session), within it ``attempt``
(one attempt of a round), and ``provision`` (the pair of edges).  ``participant``, ``provisioner``
perform what the machines ask for; ``supervisor`` owns the worker process, which speaks the lines of
``signals`` and finds payload in the slots of the arena only.

Beside training a node hosts stages of models that are spread over several nodes.  ``stage`` decides
what becomes of one, ``stage_host`` performs it: one worker process for each (``stage_process``, in
the lines of ``stage_signals``), rings of its own, and links to the nodes before and after it
(``peer_links``).
"""
