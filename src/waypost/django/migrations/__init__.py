"""Migrations of the application: waypost's tables in a database of the project."""
