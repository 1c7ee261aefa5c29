"""Routes by topic. Each module adds its own to a router and knows nothing of the others."""
