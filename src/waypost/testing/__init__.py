"""For tests of waypost and of programs that use it: a manual clock, real servers, and the suite every store must pass.

    clock         a store clock that moves only when a test advances it
    servers       real Valkey and Redis servers from wheels, started and stopped with a `with` block
    postgres      the same for PostgreSQL
    conformance   what a store must do, as tests that read as a specification
    machine       random programs on two stores at once, compared after every step
    plugin        the pytest plugin: the `promise` mark and the fixtures of the suite

Importing this package loads nothing of the above: pytest and Hypothesis are needed only where they are used.
"""
