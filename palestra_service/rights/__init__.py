"""Roles and actions; keys, their expiry and limits."""
