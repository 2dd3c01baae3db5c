"""The control socket: how ``lensemblectl`` talks to a daemon on the same machine.

One JSON object a line, each way.  The client begins with ``Hello``; the daemon answers with
``Greeting``, or refuses another version of this protocol.  Then the client sends one request at a
time; the daemon answers with any number of replies and ends with ``End``, or with ``Failed``, which
says why and what to do.  While an answer takes its time the daemon sends ``Alive``, so that a
client can tell a busy daemon from a wedged one::

    client                                daemon
    ------ {"type":"Hello",...} --------->
    <----- {"type":"Greeting",...} -------
    ------ {"type":"Run","rounds":5} ---->
    <----- {"type":"RunStarted",...} -----
    <----- {"type":"CoordinatorStatus"} --   at each change
    <----- {"type":"Alive"} --------------   when nothing changes
    <----- {"type":"RunEnded",...} -------
    <----- {"type":"End"} ----------------

A client that goes away ends only its own answer; the rounds go on.
"""
