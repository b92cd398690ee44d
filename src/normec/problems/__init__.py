"""What is minimised: a model, a loss and one data set per client, or plain functions."""
