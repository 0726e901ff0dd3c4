"""`octavo top`: who holds a server's memory, in a terminal."""
