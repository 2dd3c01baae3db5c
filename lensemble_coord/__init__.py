"""The coordinator: drives federated rounds, reduces updates, commits checkpoints to its ledger."""
