"""The live view of `waypost watch`: what is collected of a store, and the screen that shows it."""
