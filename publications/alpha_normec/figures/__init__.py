"""The figures and tables of the paper, drawn from the records of cells."""
