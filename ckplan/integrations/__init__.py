"""One line for the loops of others; each file needs the library it is named after."""
