"""Ways out of a record and into other tools, one file a partner; each partner is imported only when it is asked for."""
