"""One file a tool: how its own documentation says that values, gradients and edits are asked for."""
