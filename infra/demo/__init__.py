"""`offsetrl demo`: the whole loop on this machine, watched, checked and reported."""
