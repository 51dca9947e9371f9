"""Wake-ups: a word to those who sleep, so that they look now and not at their next poll.

    port       what a channel is: topics, listeners, words
    hub        the listeners of one process on one channel, and the thread that all of them share
    bell       how a call that waits for a message is woken, in both colours
    wakeups    one client's part in a channel
    opening    from a store and the option `wake` to that part
    local, files, valkey, postgres, nats    the channels

Wake-ups are fire and forget. Nothing depends on one: who hears none looks at the store's next moment, or after the
safety poll. The store decides whom to wake; a channel only carries names.
"""
