"""How gradients come to be seen and changed: tensor hooks set from forward hooks."""
