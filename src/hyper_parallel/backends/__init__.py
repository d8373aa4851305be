"""Back ends: framework-specific code. Each folder imports its own framework and no other back end."""
