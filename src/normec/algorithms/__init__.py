"""Methods: what clients send and what the server does with it. Operators, and the registry of methods by name."""
