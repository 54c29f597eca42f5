"""How often the verdict is right: scripts with one fault each, and healthy ones, run as anybody would run them."""
