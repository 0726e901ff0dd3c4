"""The step loop, its real executor, and the Python API over them."""
