"""Tables and plots; they read results only."""
