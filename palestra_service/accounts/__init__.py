"""Tenants, users and keys: who sends a request, and how an administrator changes them."""
