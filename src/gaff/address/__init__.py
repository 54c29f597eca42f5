"""Where a tensor is: the grammar of addresses, what they name in a model, and nested values by key."""
