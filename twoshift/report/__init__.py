"""Tables, pages and plots of results. Nothing here trains or runs a model."""
