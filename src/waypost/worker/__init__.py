"""The worker: sleeps until there is something to do, claims it, runs the handlers, and settles.

    handler    what a user's function wants to be given, and how it is to be run (nothing else is loaded with waypost)
    signature  what its parameters ask for
    consumer   one per handler: the claim loop, and as many runners as handlers may run at once
    settling   one per handler: outcomes of many messages in one call
    notifications  what it listens to: wake-ups, and requests to cancel a message
    poll_soon  when it polls again within milliseconds instead of sleeping
    waiting    how it waits, asleep on its loop or in a blocking wait in the store (`wait_machine` has the states)
    renewing   one thread that renews the leases of all consumers, whatever the event loop is doing
    register   one thread that tells the store of the worker (`registering`)
    health     judges whether it consumes
    calling    where a handler runs, with the middleware around it: on the event loop,
    threads    in threads, if it blocks,
    processes  or in processes, if it computes (`child` is their program, `wire` what is said between them)
    worker     starts and stops all of them; `blocking` does so for the face that blocks
    signals    SIGINT, SIGTERM and SIGHUP as requests to stop

Each moving part has `start` and `stop`, and a loop of its own in between.
"""
