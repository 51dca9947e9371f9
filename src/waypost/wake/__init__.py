"""Wake-ups: notifications to sleeping workers, so that they poll now and not at their next safety poll.

    port       the contract of a channel: topics, listeners, notifications
    hub        the listeners of one process on one channel, and the thread that all of them share
    transport  the contract of a channel's connection, and what connections with a socket share
    wakeups    one client's part in a channel, and the event on which a waiting call sleeps
    opening    from a store and the option `wake` to that part
    sqlite, valkey, postgres, nats    the transports

Wake-ups are fire and forget. Nothing depends on one: a worker that receives none polls at the store's next moment, or
after the safety interval. The store decides which sleepers to wake; a channel only carries their names.
"""
