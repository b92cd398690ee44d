"""How all clients' gradients are computed; every engine gives what the loop, the reference, gives."""
