"""Conversations: their formats, their template, and which tokens count."""
