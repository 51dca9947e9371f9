"""Reading a store in bulk: Arrow batches straight from what each store keeps, without an object for each row."""
