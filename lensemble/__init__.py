"""What both daemons and the command agree on: identities, messages, edges, digests and files.

One round, as an update travels it::

    coordinator                                   node daemon            worker process
    ----------- RoundOpen (digests, seed) ------->
    <---------- Commitment (dataset root) --------
    =========== state blob, on its edge ======================> slot --> W_t
    ----------- Roster (keys of all) ------------>
    <---------- Shares (encrypted to the others) -
    ----------- Collect (who takes part) -------->                       H inner steps
    <---------- Update (digest, bytes) -----------                       release
    <========== update blob, on its edge ====================== slot <-- integer field + masks
    freeze the contributors
    ----------- UnmaskRequest (whose sum) ------->
    <---------- UnmaskAnswer (shares) ------------
    sum twice, outer step, checkpoint, one ledger record (the commit)
    ----------- RoundClose (new digest, C_t) ---->

Both heavy arrows are *edges*: a slot in a shared-memory arena, a byte pump, one QUIC stream, a
pump, a slot.  The control plane names edges and passes slot indices; it never touches payload.
"""
