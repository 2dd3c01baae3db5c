"""Who is there: SWIM with Lifeguard's three ideas, as a machine that does no IO.

Each interval a member probes one other, chosen in turn.  A probe without answer is repeated, and
two helpers are asked to probe for it; without any answer the member is suspected, and told so.  Who
hears itself suspected or called dead says that it lives, with a higher incarnation.  A suspicion
that nobody refutes in time is a death.  What is known travels on the probes and their answers.

::

                    no answer                     time is up
          +-------+ ----------------> +---------+ ----------> +------+
          | alive |                   | suspect |             | dead |
          +-------+ <---------------- +---------+             +------+
            |   ^    higher incarnation   |                      |
            |   +-------------------------+----------------------+
            |            higher incarnation (refuted, or restarted)
            +--> left (said by the leaver; ends with a higher incarnation)

At equal incarnations left outranks dead, dead outranks suspect, suspect outranks alive; a higher
incarnation outranks all.  Only a member itself raises its incarnation, and only above a claim that
is at least as high.  A member that has restarted starts at the first incarnation with another
``boot``; whoever knows its past tells it, and it goes above that.  So claims about a past life are
always outranked, in whatever order they come.

Lifeguard (Dadgar, Phillips, Currey 2018) adds: a member that misses answers, or that is itself
suspected, doubts itself first and becomes slower to blame (``health``); a suspicion starts long and
becomes shorter as others confirm it; whoever speaks to a suspect tells it before anything else.

SWIM: Das, Gupta, Motivala 2002.
"""
