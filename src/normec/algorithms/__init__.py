"""What clients send and what the server does with it: operators, methods, and the registry of methods by name."""
