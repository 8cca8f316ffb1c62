"""What is chosen for each problem on Hopper: tiles, stages, schedules. Pure functions and plain data, no CuTe DSL."""
