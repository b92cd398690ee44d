"""What a true guarantee leaves of each method: studies over data, clients and ε, every method tuned alike."""
