"""Who is computed in the next step, on which pages. Pure Python on plain integers."""
