"""Holds FIXME."""
