"""The engines that compute all clients' gradients. The loop is the reference that every engine must reproduce."""
