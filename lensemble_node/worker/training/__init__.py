"""Local training of a federated model: data, objective, steps and what is released."""
