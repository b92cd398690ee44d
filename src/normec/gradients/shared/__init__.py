"""One forward and one data-gradient pass for all clients; weight gradients and statistics are per client."""
