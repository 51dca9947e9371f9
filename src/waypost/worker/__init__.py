"""The worker: sleeps until there is something to do, claims it, runs the handlers, and settles.

    handler    what a user's function wants to be given, and how it is to be run (nothing else is loaded with waypost)
    consumer   one per handler: the claim loop, and as many runners as handlers may run at once
    settling   one per handler: outcomes of many messages in one call
    waking     what a consumer hears: wake-ups, and requests to stop a message; `lingering` says when not to sleep
    renewing   one thread that renews the leases of all consumers, whatever the event loop is doing
    threads    where handlers that block run
    worker     starts and stops all of them; `blocking` does so for the face that blocks
    signals    SIGINT, SIGTERM and SIGHUP as requests to stop

Each moving part has `start` and `stop`, and a loop of its own in between.
"""
