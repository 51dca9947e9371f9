"""A shop: each order is stored together with its message, shipped by a worker, and receipted by a task."""
