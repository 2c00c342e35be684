"""Many images to a table of predictions: online, as they come, or offline, in several passes."""
