"""The worker: sleeps until messages can be claimed, claims them, runs the handlers, and settles.

    handler            a registered handler: its options and parameters (nothing else is loaded with waypost)
    worker             starts and stops all parts; `sync_worker` does so for the sync client
    consumer           one per handler: the claim loop, and as many runners as handlers may run at once
    waiter             how a consumer waits between two claims: asleep on its loop, or in a blocking wait in the store
    wait_machine       the states of that wait
    handler_calls      a handler call with its middleware: on the event loop, in a thread, or in a process
    process_pool       the processes of one handler; `process_child` is their program, `process_protocol` the frames
    settler            one per handler: outcomes of many messages in one call
    renewer            one thread that renews the leases of all consumers, whatever the event loop is doing
    poller             one thread that sends heartbeats and polls all idle queues
    health             judges whether the worker consumes, and makes its heartbeats
    executor_adapters  async executors for sync clients, and the other way round
    signals            SIGINT, SIGTERM and SIGHUP as requests to stop

Each moving part has `start` and `stop`, and runs its own loop between them.
"""
