"""Runnable studies: one folder each, with its question, its command and its result."""
