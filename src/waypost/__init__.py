"""waypost"""
