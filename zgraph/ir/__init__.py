"""The graph dialect: its ops, and the handle through which passes read and edit graphs."""
