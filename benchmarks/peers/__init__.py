"""Other queues, each in its own environment, so that figures can be compared.

    registry    the peers: name, store, exact versions, the program of each
    setup       makes their environments under `.bench/`
    protocol    what such a program understands; runs inside the peers' environments, on the standard library alone
    hosts       a server for all of them, and a clean place on it for each
    harness     one turn: starts a program, watches the start times that its handlers write, and ends it
    turns       round by round, each contender once

One file per peer: `<peer>_peer.py` or `<peer>_peer.mjs`.
"""
