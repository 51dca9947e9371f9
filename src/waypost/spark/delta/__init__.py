"""Delta tables: committed through the `deltalake` library, without a jar, for any reader of that format.

`parquet` writes data files, `table` commits them to one table, `steps` commits one step to several tables at once, and
`data_source` lets Spark's tasks write and read the files. Importing this package loads none of these.
"""
