"""Step engines: each takes requests and gives turns, and knows nothing of models or time."""
