"""What noise buys: the accountant of releases, and plans made with it.

``dp-accounting`` does the arithmetic.  It brings scipy and is imported at the first use, by a
process that accounts: a node's worker, a coordinator that plans a private run, ``privacy plan``.
"""
