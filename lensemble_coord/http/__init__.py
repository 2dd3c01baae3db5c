"""Models over HTTP, in the shapes that clients of the OpenAI API send and expect.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models
    GET  /health                GET  /metrics

``asked`` reads a request and refuses what it does not honour, ``choice`` finds the run that
answers, ``answering`` carries its pieces to the client, ``shapes`` and ``refusal`` say how answers
and errors look.  ``door`` is what the daemon starts.
"""
