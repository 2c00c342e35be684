"""Running methods over streams and keeping the results."""
