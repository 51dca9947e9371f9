"""Republishing at scale: rows of any table as messages, and dead letters chosen by SQL.

A plan is made with Spark: the rows that are new compared with the whole history, or the dead letters that were chosen,
written to files. It is carried out without Spark, a chunk at a time. Before a chunk is sent it is recorded as intent in
a Delta table, so that a chunk in doubt after a kill is asked of the store and of the lake before it is sent again.

    plan.py      rows of a DataFrame, what the history knows, and the new rows as files   (Spark)
    letters.py   dead letters that SQL chooses                                            (Spark)
    state.py     the plan, the chunk that is intended, and what was done, as a Delta table
    known.py     what store, lake and journal know of keys and messages
    pace.py      a rate that gives way to live traffic
    run.py       carrying out a plan
    audit.py     what became of the messages
"""
