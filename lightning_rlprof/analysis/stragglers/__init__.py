"""Ranks that slow the others down."""
