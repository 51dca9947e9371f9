"""What `waypost doctor` looks at: what all stores have in common, and for each kind what only it has."""
