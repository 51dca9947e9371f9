"""The data source `format("waypost")`: reads and writes of a store as Spark plans and runs them."""
