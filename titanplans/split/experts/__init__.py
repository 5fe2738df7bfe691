"""Sharding by experts: a rank holds all of some experts, and rows are sent to them."""
