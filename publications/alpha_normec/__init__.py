""" "Smoothed Normalization for Efficient Distributed Private Optimization", figure by figure."""
