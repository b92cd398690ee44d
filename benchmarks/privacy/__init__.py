"""The privacy benchmark: methods compared under the same guarantee, each tuned with the same budget."""
