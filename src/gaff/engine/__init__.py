"""All that touches torch's hooks. Says when a site fires; knows nothing of what is done with the values."""
