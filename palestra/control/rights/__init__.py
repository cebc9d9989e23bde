"""What a key may do: roles, actions, expiry and limits."""
