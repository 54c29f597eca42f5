"""Where the first NaN or inf of a step began: op, line, ranges, likely cause."""
