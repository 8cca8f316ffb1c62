"""What is chosen for each problem on Blackwell: tiles and stages. Pure functions and plain data, no CuTe DSL."""
