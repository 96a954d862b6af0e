"""What rounding does to a function: noise of one unit in the last place, and the function in float64 throughout."""
