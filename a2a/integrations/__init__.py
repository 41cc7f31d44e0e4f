"""One file for each framework that a2a plugs into."""
