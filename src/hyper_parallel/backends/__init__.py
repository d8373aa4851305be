"""Back ends: what only one framework can do. Each folder imports its framework and no other back end."""
