"""How ranks come to be: environment, zygote, fork or fresh interpreter, the store of a cycle."""
